"""Checks before training: of the folder, the model, the data and the schedules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from eventloop.checkpoint.saver import interval_of
from eventloop.data.combined import NoData
from eventloop.data.loaders import loader_of
from eventloop.errors import PluginError, SettingError, TaskError, a
from eventloop.files.run_folder import why_no_folder
from eventloop.fixes import as_set
from eventloop.task.schedule_curves import Schedule
from eventloop.training.optimizers import params_of

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.plugin.registry import Registry
    from eventloop.run.runtime import Run
    from eventloop.state import State


# Fraction of the initial learning rate that counts as 0: a schedule may reach 0 only up to rounding.
_ZERO_FRAC = 1e-10


def require_usable(path: Path) -> None:
    """Raises SettingError if files can't be written in the folder of a run; creates nothing."""
    if reason := why_no_folder(path):
        raise SettingError(
            f"run_dir: nothing can be written in {str(path)!r}: {reason}",
            fix="give another folder, " + as_set(run_dir="FOLDER"),
        )


def check_model(state: State, assembly: Registry) -> None:
    """Raises PluginError if an algorithm's `init` has replaced the model with something else."""
    if not isinstance(state.model, nn.Module):
        plugins = (implementation.origin for implementation in assembly.implementations["init"])
        raise PluginError(
            f"after init, state.model is {a(type(state.model).__name__)}, not an nn.Module",
            by=", ".join(plugins),
            fix="assign the changed model, `state.model = changed(state.model)`, or change it in "
            "place",
        )


def check_memory(state: State) -> None:
    """Raises TaskError if a parameter is still on the meta device after `wrap_model`."""
    for name, param in state.model.named_parameters():
        if param.is_meta:
            raise TaskError(
                f"the parameter {name!r} is on the meta device, and has no values",
                fix="build the model on a device with memory, such as `torch.device('cpu')`",
            )


def check_eval_dataloaders(state: State) -> None:
    """Raises TaskError if an eval data loader is known to have no batch."""
    for name, dataloader in state.eval_dataloaders.items():
        if loader_of(dataloader).num_batches == 0:
            raise TaskError(
                f"the eval data loader {name!r} has no batch",
                fix="give it data, or leave it out of Task(eval_dataloaders=...); drop_last=True "
                "drops a set that is smaller than a batch",
            )


def warn_of_resume_risks(state: State, risks: Iterable[str]) -> None:
    """Warns at the start of a run with checkpoints about data that may not resume exactly."""
    if state.rank == 0 and interval_of(state.settings) is not None:
        for risk in risks:
            warnings.warn(
                f"the train data loader is {risk}: a resumed run reads its epoch from the beginning, and may get "
                "other batches than before (then it loses and repeats up to as many as its epoch has had); "
                "for an exact resume, the loader needs state_dict and load_state_dict, or must be made by "
                "`zipped` and `cycled`",
                stacklevel=2,
            )


def warn_of_zero_rates(state: State) -> None:
    """Warns if a run would continue with learning rates of 0.

    A schedule of `eventloop.schedules` warns itself, after a batch was trained at 0.
    """
    schedulers = [scheduler for pairs in state.schedulers.values() for _, scheduler in pairs]
    warns_itself = any(
        isinstance(scheduler, Schedule) and scheduler.rule is None for scheduler in schedulers
    )
    if not state.clock.batch or state.rank != 0 or warns_itself:
        return
    groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
    rates = [(float(group.get("lr", 1.0)), float(group.get("initial_lr", 1.0))) for group in groups]
    if rates and all(abs(rate) <= _ZERO_FRAC * abs(initial) for rate, initial in rates):
        classes = ", ".join(sorted({type(scheduler).__name__ for scheduler in schedulers}))
        by_schedulers = f" by {classes}" if classes else ""
        warnings.warn(
            f"the run resumes at batch {state.clock.batch} with learning rates of 0{by_schedulers}: "
            "training has no effect while they are 0; give the schedule a length as long as "
            "the run, or an end above 0",
            stacklevel=3,
        )


def check_evaluation(run: Run) -> None:
    """Raises SettingError if the user has requested evaluations, but there is nothing to evaluate."""
    settings = run.state.settings
    if run.state.eval_sets or run.active.evaluates:
        return
    interval = run.configuration.setting_values(run.task.settings)["eval_interval"]
    request = "eval_at_start is set" if settings.eval_at_start else ""
    if interval.source != "default" and settings.eval_interval is not None:
        request = f"eval_interval is {settings.eval_interval}"
    if request:
        raise SettingError(
            f"{request}, but there is nothing to evaluate",
            fix="give Task(eval_dataloaders=...), leave the setting out, or implement an evaluation "
            "hook in a plugin: `eval_after_all`",
        )


def check_trainable(run: Run, end: Time) -> None:
    """Raises TaskError or SettingError if a fit lacks something: data, parameters or tokens."""
    state = run.state
    assembly = run.active.assembly
    _check_train_dataloader(state, assembly, end)
    if not params_of(state.optimizers.values()):
        raise TaskError(
            "no optimizer holds a parameter, so nothing would be trained",
            fix="give parameters to an optimizer, such as "
            "Task(optimizer=lambda model: SGD(model.parameters(), lr=0.1))",
        )
    # `Task` always implements count_batch, but counts tokens only with num_tokens.
    roles_without_tokens = ("core",) if run.task.counts_tokens else ("core", "task")
    lengths_in_tokens = _lengths_in_tokens(state, end)
    if lengths_in_tokens and assembly.owner("count_batch").role in roles_without_tokens:
        raise SettingError(
            f"{lengths_in_tokens[0]}, but tokens aren't counted",
            fix="count them: Task(num_tokens=lambda inputs: inputs.numel())",
        )


def _lengths_in_tokens(state: State, end: Time) -> list[str]:
    """Returns a clause for each duration, interval and schedule that is counted in tokens."""
    settings = state.settings
    lengths = (
        ("the run ends at", end),
        ("eval_interval is", settings.eval_interval),
        ("log_interval is", settings.log_interval),
    )
    clauses = [f"{start} {length}" for start, length in lengths if length and length.unit == "tok"]
    for pairs in state.schedulers.values():
        for name, scheduler in pairs:
            if isinstance(scheduler, Schedule) and scheduler.course.unit == "tok":
                clauses.append(f"the schedule of {name!r} is counted in tokens")
    return clauses


def _check_train_dataloader(state: State, assembly: Registry, end: Time) -> None:
    if isinstance(state.train_dataloader, NoData) and end.unit == "ep":
        raise TaskError(
            f"the run is to end after {end}, but without a train data loader an epoch has no end",
            fix="count the run in batches: max_duration=1000ba",
        )
    is_core = assembly.owner("build_train_dataloader").role == "core"
    if is_core and not isinstance(state.train_dataloader, NoData):
        raise TaskError(
            "the task has no train data loader",
            fix="give Task(train_dataloader=DataLoader(...)); it can be left out if the task or a plugin "
            "owns `forward` or `train_batch`, and max_duration is in batches",
        )
    _warn_of_endless_epochs(state)
    if state.num_batches == 0:
        raise TaskError(
            "the train data loader has no batch",
            fix="give Task(train_dataloader=...) data; drop_last=True drops a set that is "
            "smaller than a batch",
        )
    questions = ("should_end_epoch", "should_rebuild_dataloader")
    may_end_early = any(assembly.implementations[question] for question in questions)
    if loader_of(state.train_dataloader).is_endless and end.unit == "ep" and not may_end_early:
        raise TaskError(
            f"the run is to end after {end}, but an epoch of a data loader that is cycled has no end",
            fix="count the run in batches, max_duration=1000ba, or combine it with a loader that ends: "
            "zipped(a, cycled(b))",
        )
    num_epochs = end.value - state.clock.epoch if end.unit == "ep" else 0
    if isinstance(state.train_dataloader, Iterator) and num_epochs > 1 and not may_end_early:
        raise TaskError(
            f"the train data loader is {a(type(state.train_dataloader).__name__)}, which is used "
            f"up after one epoch, but {num_epochs} are to come",
            fix="use an iterable that can be iterated again, such as a list or a DataLoader",
        )


def _warn_of_endless_epochs(state: State) -> None:
    """Warns if a run saves after each epoch, but its epochs never end."""
    interval = interval_of(state.settings)
    in_epochs = interval is not None and interval.unit == "ep"
    if state.rank == 0 and in_epochs and loader_of(state.train_dataloader).is_endless:
        warnings.warn(
            f"checkpoint_interval is {interval}, but an epoch of this run has no end, so that only its "
            "start and its end are saved; count it in batches: 500ba",
            stacklevel=4,
        )
