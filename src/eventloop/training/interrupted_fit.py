"""Where a fit raised, and with which batch, so that the next fit can continue from there."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

# Private, but the base class of all batch norms, SyncBatchNorm included (torch 2.13).
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
# batch done       `should_end_epoch` and `should_stop` are next
# epoch ...        the same stages at the end of an epoch
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
        stage: the last stage that was reached.
        has_begun: whether training on the batch had begun.
        may_have_stepped: whether weights may have changed although `stage` is "taken": a plugin or
            the task owns `train_batch`, and its steps can't be observed.
        batch: `state.batch` when the fit raised.
        loss: `state.loss` when the fit raised.
    """

    stage: Stage
    has_begun: bool
    may_have_stepped: bool
    batch: Any
    loss: Tensor | None

    @property
    def repeats_batch(self) -> bool:
        """Whether the next fit trains on the batch again from its beginning."""
        return self.stage == "taken" and not self.may_have_stepped

    @property
    def loses_batch(self) -> bool:
        """Whether the batch may have changed only some of the weights."""
        return self.stage == "stepping" or (self.stage == "taken" and self.may_have_stepped)

    @property
    def has_uncounted_batch(self) -> bool:
        """Whether the clock must still count a batch that isn't repeated."""
        return self.stage in _BEFORE_CLOCK and not self.repeats_batch

    @property
    def is_in_epoch(self) -> bool:
        """Whether the fit raised after training on a batch, before the batch was finished."""
        return self.has_uncounted_batch or self.stage in _AFTER_CLOCK

    @property
    def is_after_epoch(self) -> bool:
        """Whether the fit raised at the end of an epoch."""
        return self.stage.startswith("epoch")


def require_same_stage(processes: Processes, interrupted: InterruptedFit | None) -> None:
    """Raises EventloopError if the ranks would continue at different stages. Collective."""
    stage = interrupted.stage if interrupted is not None else "idle"
    if not processes.are_same(stage):
        stages = processes.all_gather(stage)
        stages_by_rank = ", ".join(f"rank {rank}: {stage}" for rank, stage in enumerate(stages))
        raise EventloopError(
            f"the last fit raised at different places on the ranks, so they can't continue ({stages_by_rank})",
            fix="start the processes again; the run resumes from its newest checkpoint",
        )


def warn_of_lost_batch(state: State, interrupted: InterruptedFit) -> None:
    """Warns that a batch may have changed only some of the weights and isn't repeated."""
    if state.rank != 0:  # all ranks raised at the same stage
        return
    if interrupted.stage == "stepping":
        moment = "within one of its optimizer steps or after one"
    else:
        owner = state.owner("train_batch")
        moment = f"in train_batch of {owner!r}, whose optimizer steps can't be observed,"
    clock = state.clock
    warnings.warn(
        f"batch {clock.batch + 1} (epoch {clock.epoch + 1}) raised {moment} and isn't repeated, since some "
        "weights may have changed already; training continues with the next batch. To train on the "
        "whole batch, resume from a checkpoint in a new process",
        stacklevel=2,
    )


def warn_of_counts_twice(state: State) -> None:
    """Warns about batch norm statistics and metrics that count a repeated batch twice."""
    affected = []
    for name, module in state.model.named_modules():
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            affected.append(f"the statistics of {name}")
            break  # the first batch norm is enough for a warning
    affected += [f"the metric train/{name}" for name in state.metrics["train"]]
    if affected and state.rank == 0:
        warnings.warn(
            f"batch {state.clock.batch + 1} is trained on again, since the last fit raised in it: "
            f"{' and '.join(affected)} may count it twice. Resume from a checkpoint in a new process "
            "to get the numbers of an uninterrupted run",
            stacklevel=2,
        )
