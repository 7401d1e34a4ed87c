"""What can say where it is, and go on from there: torch's protocol, without its import."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object like those of `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """Gives where it is."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from what `state_dict` gave."""
