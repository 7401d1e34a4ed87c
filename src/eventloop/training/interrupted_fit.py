"""What a fit that raised leaves for the next one: where it was, and with which batch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

# Private, but what all batch norms are, those over several ranks included (torch 2.13).
from torch.nn.modules.batchnorm import _BatchNorm

from eventloop.errors import EventloopError

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State

# The last thing that the loop has begun or finished:
# idle             nothing is outstanding
# taken            a batch was taken; no weight has changed
# stepping         an optimizer step has begun, or several updates are under way
# trained          all updates of the batch are made; the clock hasn't moved
# counted          the clock has moved; `batch_end` is next
# ended            `batch_end` is done; the schedulers are next
# scheduled        the schedulers have moved; evaluation and `batch_checkpoint` are next
# evaluated        both are done; the checkpoint is next
# batch done       whether to leave epoch or run is asked next
# epoch ...        likewise, at the end of an epoch
# ending           all epochs are done; test sets, the last checkpoint and `fit_end` are next
Stage = Literal[
    "idle",
    "taken",
    "stepping",
    "trained",
    "counted",
    "ended",
    "scheduled",
    "evaluated",
    "batch done",
    "epoch counted",
    "epoch ended",
    "epoch scheduled",
    "epoch evaluated",
    "epoch done",
    "ending",
]
_BEFORE_CLOCK = ("taken", "stepping", "trained")
_AFTER_CLOCK = ("counted", "ended", "scheduled", "evaluated", "batch done")


@dataclass(frozen=True)
class InterruptedFit:
    """Where a fit was when it raised.

    Args:
        stage: how far it had come.
        has_begun: whether training on the batch had begun.
        may_have_stepped: whether weights may have changed, although `stage` is "taken": a plugin or
            the task owns `train_batch`, and its steps can't be observed.
        batch: `state.batch` of that moment.
        loss: `state.loss` of that moment.
    """

    stage: Stage
    has_begun: bool
    may_have_stepped: bool
    batch: Any
    loss: Tensor | None

    @property
    def repeats_batch(self) -> bool:
        """Whether the batch is trained on from its beginning."""
        return self.stage == "taken" and not self.may_have_stepped

    @property
    def loses_batch(self) -> bool:
        """Whether some weights may have the batch and others not."""
        return self.stage == "stepping" or (self.stage == "taken" and self.may_have_stepped)

    @property
    def has_uncounted_batch(self) -> bool:
        """Whether the clock has yet to count a batch that isn't repeated."""
        return self.stage in _BEFORE_CLOCK and not self.repeats_batch

    @property
    def is_in_epoch(self) -> bool:
        """Whether a batch was the last thing that happened, so that its end is outstanding."""
        return self.has_uncounted_batch or self.stage in _AFTER_CLOCK

    @property
    def is_after_epoch(self) -> bool:
        """Whether the end of an epoch is outstanding."""
        return self.stage.startswith("epoch")


def require_same_stage(processes: Processes, interrupted: InterruptedFit | None) -> None:
    """Raises EventloopError if ranks would continue at different places. Collective."""
    stage = interrupted.stage if interrupted is not None else "idle"
    if not processes.are_same(stage):
        stages = processes.all_gather(stage)
        where = ", ".join(f"rank {rank}: {stage}" for rank, stage in enumerate(stages))
        raise EventloopError(
            f"the last fit raised at different places on the ranks, so they can't continue ({where})",
            fix="start the processes again; the run resumes from its newest checkpoint",
        )


def warn_of_lost_batch(state: State, interrupted: InterruptedFit) -> None:
    """Warns that a batch is neither wholly part of the weights nor repeated."""
    if state.rank != 0:  # all ranks know it
        return
    if interrupted.stage == "stepping":
        place = "within one of its optimizer steps or after one"
    else:
        owner = state.owner("train_batch")
        place = f"in train_batch of {owner!r}, whose optimizer steps can't be observed,"
    clock = state.clock
    warnings.warn(
        f"batch {clock.batch + 1} (epoch {clock.epoch + 1}) raised {place} and isn't repeated, since some "
        "weights may have changed already; training continues with the next batch. To train on it as "
        "a whole, resume from a checkpoint in a new process",
        stacklevel=2,
    )


def warn_of_counts_twice(state: State) -> None:
    """Warns of statistics and metrics that count a repeated batch twice."""
    counting = [
        f"the statistics of {name}"
        for name, module in state.model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ][:1]
    counting += [f"the metric train/{name}" for name in state.metrics["train"]]
    if counting and state.rank == 0:
        warnings.warn(
            f"batch {state.clock.batch + 1} is trained on again, since the last fit raised in it: "
            f"{' and '.join(counting)} may count it twice. Resume from a checkpoint in a new process "
            "for the numbers of a run that never raised",
            stacklevel=2,
        )
