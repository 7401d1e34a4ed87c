"""Updates of sharded matrices, computed from whole ones: those of one process, to rounding; free of hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Private: torch has no public way to orthogonalize otherwise (torch 2.13).
from torch.optim import _muon

from eventloop.toolbox import shard_of, sharded


@contextmanager
def whole_matrices() -> Iterator[None]:
    """Has `torch.optim.Muon` gather a matrix that is sharded, one at a time, before it orthogonalizes it.

    Over shards the products of Newton-Schulz would be sums over the ranks in bf16, several for each of
    its steps.
    """
    alone: Any = _muon._zeropower_via_newtonschulz

    def gathered(update: Any, *given: Any) -> Any:
        one = sharded(update)
        if one is None:
            return alone(update, *given)
        from torch.distributed.tensor import DTensor

        held = shard_of(alone(one.full_tensor(), *given), one)
        mesh = one.device_mesh
        places = one.placements
        shape = one.shape
        return DTensor.from_local(
            held, mesh, places, run_check=False, shape=shape, stride=one.stride()
        )

    _muon._zeropower_via_newtonschulz = gathered  # type: ignore[assignment]
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = alone
