"""What optimizers and schedules are made with: where it may change as a run goes on, it does."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.optim.lr_scheduler import LRScheduler

from eventloop.state import State
from eventloop.task.courses import Schedule

_NUMBER = re.compile(r"optimizers\.(.+?)\.groups\.(\d+)\.(\w+)")


class MadeWith:
    """Keeps what optimizers and schedules were made with, while a checkpoint is loaded.

    Args:
        state: with all of them built, and nothing loaded.
    """

    def __init__(self, state: State) -> None:
        optimizers = state.optimizers.items()
        self._groups = {name: [dict(one) for one in each.param_groups] for name, each in optimizers}
        self._schedulers = [pair for pairs in state.schedulers.values() for pair in pairs]
        self._courses = [one.course for _, one in self._schedulers if isinstance(one, Schedule)]

    def restore(self, state: State, changes: Sequence[str]) -> None:
        """Puts back numbers of optimizers that have changed, and all schedules of `schedules`.

        A learning rate stays at the share of its own to which its schedule has brought it.

        Args:
            changes: each as a line of a diff, `optimizers.sgd.groups.0.lr: 0.1 -> 0.2`.
        """
        for name, number, key in (one.groups() for one in map(_NUMBER.match, changes) if one):
            idx = int(number)
            group, made = state.optimizers[name].param_groups[idx], self._groups[name][idx]
            if key != "lr":
                group[key] = made[key]
                continue
            own, rate = group.get("initial_lr"), made.get("initial_lr", made["lr"])
            group["lr"] = rate * (group["lr"] / own if own else 1.0)
            if own is not None:
                group["initial_lr"] = rate
            for of, one in self._schedulers:
                if of == name and isinstance(one, LRScheduler):
                    one.base_lrs[idx] = rate
        followed = [one for _, one in self._schedulers if isinstance(one, Schedule)]
        for schedule, course in zip(followed, self._courses, strict=True):
            schedule.follow(course)
