"""The parts of a run are built, in order."""

from __future__ import annotations

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
)
from eventloop.run.run_manifest import parameters_of
from eventloop.training.compiling import require_layers

if TYPE_CHECKING:
    from eventloop.run.runtime import Run


def build(run: Run) -> None:
    """Asks for everything that a run needs, from the model to the metrics.

    Raises:
        EventloopError: something can't be trained.
    """
    state, hooks = run.state, run.active.plans
    # Once more: the model is the same whatever installed plugins drew when imported and built.
    seed_everything(state.settings.seed)
    state.model = hooks.build_model(state)
    hooks.init(state)
    check_model(state, run.active.assembly)
    state.wrapped_model = hooks.wrap_model(state)
    require_layers(state)
    check_memory(state)
    state.optimizers = hooks.build_optimizers(state)
    check_optimizers(state)
    state.precision.check(state.model, state.optimizers)
    state.train_dataloader = hooks.build_train_dataloader(state)
    _drop_unsuitable(run)
    run.loop.feeds.take(state, state.train_dataloader)
    state.eval_dataloaders = hooks.build_eval_dataloaders(state)
    check_eval_dataloaders(state)
    state.eval_sets = [name for name in state.eval_dataloaders if name not in state.test_sets]
    state.schedulers = hooks.build_schedulers(state)
    datasets = ("train", *(f"eval/{name}" for name in state.eval_dataloaders))
    state.metrics = {name: hooks.build_metrics(state, name) for name in datasets}
    trained = {**run.task.described, "parameters": parameters_of(state.model)}
    known = {"optimizers": described(state.optimizers), "absent": [], "trained": trained}
    state.manifest = {**state.manifest, **known}
    seed_rank(state.settings.seed, state.rank)


def _drop_unsuitable(run: Run) -> None:
    """Asks the plugins that want to know whether they suit the first batch."""
    asked = [one for one in run.active.assembly.plugins if callable(one.facts.unsuitable)]
    if not asked:
        return
    state = run.state
    with kept_generators(), kept_places(state.train_dataloader):
        first, state.train_dataloader = first_batch(state.train_dataloader)
    mine: dict[str, str] = {}
    if first is not None:
        state.batch = run.loop.move(first)
        mine = unsuitable_reasons(asked, state, run.configuration.who_insists)
        state.batch = None
    # What doesn't suit one rank is off on all.
    reasons = {name: why for one in state.all_gather(mine) for name, why in one.items()}
    if reasons:
        run.freeze(without(run.active.assembly, reasons))
