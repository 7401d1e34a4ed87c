"""The start of a run: the task's parts are built, in order, and restored from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from eventloop.checkpoint.capture import described
from eventloop.data.combine import first_batch
from eventloop.data.iterables import kept_places
from eventloop.plugin.manager import unsuitable_reasons, without
from eventloop.rng import kept_generators, seed_everything, seed_rank
from eventloop.run.checks import (
    check_eval_dataloaders,
    check_memory,
    check_model,
    check_optimizers,
    warn_of_doubts,
)
from eventloop.run.run_manifest import parameters_of
from eventloop.training.compiling import require_layers

if TYPE_CHECKING:
    from eventloop.config.choice import Reason
    from eventloop.plugin.records import Found
    from eventloop.run.runtime import Core
    from eventloop.run.start import Start


def build(
    core: Core,
    start: Start,
    who_insists: Callable[[Found], Reason | None],
    described_task: Mapping[str, str],
) -> None:
    """Asks for everything that a run needs, from the model to the metrics.

    Args:
        core: of the run; its plans are frozen.
        start: what the run goes on from.
        who_insists: returns what asked for a plugin by name.
        described_task: the values of the task, each in a few words.

    Raises:
        EventloopError: something can't be trained, or isn't what the run was begun with.
    """
    state, hooks = core.state, core.active.plans
    # Once more: the model is the same whatever installed plugins drew when imported and built.
    seed_everything(state.settings.seed)
    state.model = hooks.build_model(state)
    hooks.init(state)
    check_model(state, core.active.assembly)
    state.wrapped_model = hooks.wrap_model(state)
    require_layers(state)
    check_memory(state)
    state.optimizers = hooks.build_optimizers(state)
    check_optimizers(state)
    optimizers = described(state.optimizers)
    start.check_optimizers(optimizers)
    state.precision.check(state.model, state.optimizers)
    state.train_dataloader = hooks.build_train_dataloader(state)
    _drop_unsuitable(core, who_insists)
    core.loop.feeds.take(state, state.train_dataloader)
    state.eval_dataloaders = hooks.build_eval_dataloaders(state)
    check_eval_dataloaders(state)
    state.eval_sets = [name for name in state.eval_dataloaders if name not in state.test_sets]
    state.schedulers = hooks.build_schedulers(state)
    datasets = ("train", *(f"eval/{name}" for name in state.eval_dataloaders))
    state.metrics = {name: hooks.build_metrics(state, name) for name in datasets}
    trained = {**described_task, "parameters": parameters_of(state.model)}
    known = {"optimizers": optimizers, "absent": list(start.absent), "trained": trained}
    state.manifest = {**state.manifest, **known}
    seed_rank(state.settings.seed, state.rank)
    if start.resumed is None:
        warn_of_doubts(state, core.loop.feeds.current.doubts)
    start.load(core)
    hooks.after_load(state)


def _drop_unsuitable(core: Core, who_insists: Callable[[Found], Reason | None]) -> None:
    """Asks the plugins that want to know whether they suit the first batch."""
    asked = [one for one in core.active.assembly.plugins if callable(one.facts.unsuitable)]
    if not asked:
        return
    state = core.state
    with kept_generators(), kept_places(state.train_dataloader):
        first, state.train_dataloader = first_batch(state.train_dataloader)
    mine: dict[str, str] = {}
    if first is not None:
        state.batch = core.loop.move(first)
        mine = unsuitable_reasons(asked, state, who_insists)
        state.batch = None
    # What doesn't suit one rank is off on all.
    reasons = {name: why for one in state.all_gather(mine) for name, why in one.items()}
    if reasons:
        core.freeze(without(core.active.assembly, reasons))
