"""Whether ranks that should have the same weights have them still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from eventloop.distributed.consistency import require_same, settings_of
from eventloop.errors import EventloopError

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State

# Of a parameter's norm. Less may come from rounding on machines of different kinds, and what isn't
# rounding grows until it is more.
_ROUNDING = 1e-4


def require_same_weights(
    processes: Processes, state: State, sums: Mapping[str, float], when: str
) -> None:
    """Compares weights, and the settings that move them; collective: every rank must call it.

    Args:
        sums: of each parameter, by name.
        when: since when something may differ, for the message.

    Raises:
        EventloopError: something differs; the message has the first parameter and both ranks.
    """
    settings: dict[str, object] = {}
    for name, optimizer in state.optimizers.items():
        settings |= settings_of(name, optimizer.param_groups)
    require_same(processes, "optimizers", settings, f", as seen at batch {state.clock.batch}")
    # Parameters that torch's DistributedDataParallel was told to leave alone; private, but there is
    # no public way to ask (torch 2.13).
    alone = getattr(state.model, "_ddp_params_and_buffers_to_ignore", ())
    shared = {name: one for name, one in sums.items() if name not in alone}
    if processes.are_same(shared):
        return
    norms = {name: one.detach().norm().item() for name, one in state.model.named_parameters()}
    everybody = processes.all_gather({name: (one, norms[name]) for name, one in shared.items()})
    for name in shared:
        values, sizes = zip(*(one[name] for one in everybody), strict=True)
        far = [abs(one - values[0]) for one in values]
        rank = far.index(max(far))
        if far[rank] > _ROUNDING * max(sizes):
            raise EventloopError(
                f"ranks 0 and {rank} have drifted apart: {name!r} differs {when}",
                differs=f"its sum is {values[0]:.6g} on rank 0, {values[rank]:.6g} on rank {rank}",
                fix="look for what one rank does alone: a learning rate, a hook on gradients, a step "
                "that it skips, weights that it writes",
            )
