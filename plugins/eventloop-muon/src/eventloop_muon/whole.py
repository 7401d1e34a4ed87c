"""Updates of sharded matrices, computed from whole matrices, as in one process up to rounding; free of hooks."""

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
    orthogonalize: Any = _muon._zeropower_via_newtonschulz

    def gathered(update: Any, *args: Any) -> Any:
        sharded_update = sharded(update)
        if sharded_update is None:
            return orthogonalize(update, *args)
        from torch.distributed.tensor import DTensor

        shard = shard_of(orthogonalize(sharded_update.full_tensor(), *args), sharded_update)
        mesh = sharded_update.device_mesh
        placements = sharded_update.placements
        shape = sharded_update.shape
        return DTensor.from_local(
            shard, mesh, placements, run_check=False, shape=shape, stride=sharded_update.stride()
        )

    _muon._zeropower_via_newtonschulz = gathered  # type: ignore[assignment]
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = orthogonalize
