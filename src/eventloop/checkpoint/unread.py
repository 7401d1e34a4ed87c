"""Saved tensors as torch takes them, each read when its turn comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map  # torch has no public one (torch 2.13)

from eventloop.checkpoint.saved_tensors import SavedTensor, read_all


class UnreadTensor(Tensor):
    """A saved tensor in the place of its entries, which are read while something is copied from it.

    Any other operation reads them to stay, so that whatever a model does to weights before it takes
    them, it does to these.
    """

    _saved: SavedTensor
    _held: Tensor | None

    @staticmethod
    def __new__(cls, saved: SavedTensor) -> UnreadTensor:
        """Makes one of the shape and the dtype of the saved one."""
        # Torch's documentation of subclasses has it, though it has no public name (torch 2.13).
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, saved.shape, dtype=saved.dtype, device=torch.device("cpu")
        )
        made._saved, made._held = saved, None
        return made

    def entries(self, *, to_stay: bool) -> Tensor:
        """Returns them on the host, as a plain tensor."""
        held = self._saved.read() if self._held is None else self._held
        if to_stay:
            self._held = held
        return held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_source = func is torch.ops.aten.copy_.default and not isinstance(args[0], cls)

        def read(one: Any) -> Any:
            return one.entries(to_stay=not is_source) if isinstance(one, cls) else one

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


def unread(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights by name with tensors that are still to be read in the places of saved ones."""
    return {
        name: UnreadTensor(one) if isinstance(one, SavedTensor) else read_all(one)
        for name, one in weights.items()
    }


def read_states(saved: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """Reads the state dict of an optimizer: what has the shape of its parameter, to where that is."""
    order = [param for group in optimizer.param_groups for param in group["params"]]
    states = saved.get("state")
    if not isinstance(states, Mapping):
        return read_all(saved)
    beside = read_all({key: one for key, one in saved.items() if key != "state"})
    read = {
        idx: _read_like(one, order[idx] if isinstance(idx, int) and 0 <= idx < len(order) else None)
        for idx, one in states.items()
    }
    return beside | {"state": read}


def _read_like(saved: Any, param: Tensor | None) -> Any:
    if isinstance(saved, Mapping):
        return {key: _read_like(one, param) for key, one in saved.items()}
    value = read_all(saved)
    if param is None or not isinstance(value, Tensor) or not value.ndim:
        return value
    return value.to(param.device) if value.shape == param.shape else value
