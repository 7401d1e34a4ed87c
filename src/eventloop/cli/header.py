"""The header of a run: the lines about device, task and plugins that are printed at the start."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import eventloop
from eventloop.devices import kind_of
from eventloop.secret_values import shown_options
from eventloop.training.optimizers import could_be_fused
from eventloop.urls import Url

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin, Role
    from eventloop.trainer import Trainer


def header_lines(
    trainer: Trainer, task: str, options: Mapping[str, Any], *, keeps_files: bool = True
) -> Iterator[str]:
    """Yields the lines of the header.

    Args:
        trainer: built, before it trains.
        task: TASK as typed.
        options: the task's options that were set.
        keeps_files: whether the run's folder still exists after the command.
    """
    state = trainer.state
    words = kind_of(state.device).describe()
    device = f"{state.device} ({words})" if words else str(state.device)
    layout = f", {state.layout}" if state.world_size > 1 else ""
    yield (
        f"eventloop {eventloop.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    yield (
        f"device: {device}, precision {state.precision.name}, seed {state.settings.seed}{layout}"
    )
    yield from trainer.notes
    yield f"task: {task}{_listed(options)}, {state.settings.max_duration or 'no duration'}"
    if keeps_files:
        yield f"run dir: {state.run_dir}"
    if isinstance(state.settings.run_dir, Url):
        yield f"checkpoints: {state.settings.run_dir}"
    yield f"algorithms: {_plugin_names(trainer, 'algorithm')}"
    yield f"callbacks: {_plugin_names(trainer, 'callback')}"
    for decision in trainer.assembly.decisions():
        yield str(decision)
    yield from _bypassed(trainer)
    for name, optimizer in state.optimizers.items():
        if could_be_fused(optimizer, state.device):
            kind = type(optimizer).__name__
            yield f"advice: the optimizer {name!r} steps faster as {kind}(..., fused=True)"
    if trainer.off:
        by_reason: dict[str, list[str]] = {}
        for plugin in trainer.off:
            by_reason.setdefault(plugin.reason, []).append(plugin.name)
        yield "off: " + ", ".join(
            f"{', '.join(by_reason[reason])} ({reason})" for reason in by_reason
        )


def _bypassed(trainer: Trainer) -> Iterator[str]:
    """Yields a line about plugins that have no effect because a plugin owns `train_batch`."""
    if (owner := trainer.owner("train_batch")).role == "core":
        return
    bypassed_plugins = [
        f"{impl.plugin.name} ({action})"
        for action in ("forward", "loss")
        for impl in trainer.assembly.implementations[action]
        if impl.plugin.role not in ("task", "core") and impl.plugin is not owner
    ]
    if bypassed_plugins:
        owner_name = "the task" if owner.role == "task" else owner.name
        yield (
            f"no effect in training: {', '.join(bypassed_plugins)}, because {owner_name} owns "
            "train_batch and computes outputs and losses itself"
        )


def _plugin_names(trainer: Trainer, role: Role) -> str:
    descriptions = [_plugin(plugin) for plugin in trainer.plugins if plugin.role == role]
    return ", ".join(descriptions) or "none"


def _plugin(plugin: Plugin) -> str:
    description = f"{plugin.name} {plugin.version or plugin.source}".strip()
    marks = plugin.found.marks if plugin.found else ()
    options = {} if plugin.by == "flag" else plugin.options
    return description + _listed(options) + (f" [{', '.join(marks)}]" if marks else "")


def _listed(options: Mapping[str, Any]) -> str:
    texts = (
        f"{name}={'none' if value is None else value}"
        for name, value in shown_options(options).items()
    )
    return f" ({', '.join(texts)})" if options else ""
