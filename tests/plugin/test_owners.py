"""What a person and the plugins themselves say about living together."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages
from types import SimpleNamespace

import pytest
import torch

import eventloop
from eventloop import PluginError, hookimpl, hookspec
from eventloop.config.option_types import Value
from eventloop.config.plugin_rules import Rules
from eventloop.distributed.rank_plugin import RankHooks
from eventloop.plugin.records import Plugin
from eventloop.plugin.registry import arrange, refused_by_pluggy
from eventloop.training.default_actions import Defaults
from eventloop.training.progress_lines import ProgressLines


def acts(state):
    return 1


def choosing(owners):
    """Returns the rules of a configuration that chooses owners of actions."""
    return Rules(owners={action: Value(name, "a test") for action, name in owners.items()})


@pytest.fixture
def problems_of():
    """Arranges plugins; gives the first lines of the problems."""

    def problems_of(*plugins, owners=None, installed=()):
        rules = choosing(owners or {})
        others = [Plugin(name, "callback", stage="off") for name in installed]
        return [error.what for error in arrange([*plugins, *others], rules).problems]

    return problems_of


def test_the_configuration_chooses_one_of_two_owners(plugin, problems_of):
    """The line that the error prints must make it run."""
    muon, lion = plugin("muon", build_optimizers=acts), plugin("lion", build_optimizers=acts)

    registry = arrange([muon, lion], choosing({"build_optimizers": "lion"}))

    assert registry.problems == ()
    assert registry.owner("build_optimizers") is lion
    assert len(problems_of(muon, lion)) == 1


def test_the_task_may_be_chosen_over_a_plugin(plugin):
    """A plugin replaces the task's answer, unless somebody wants the task's."""
    task = plugin("task", "task", build_optimizers=acts)
    muon = plugin("muon", build_optimizers=acts)

    replaced = arrange([task, muon])
    chosen = arrange([task, muon], choosing({"build_optimizers": "task"}))

    assert [*map(str, replaced.decisions())] == ["build_optimizers: muon, instead of the task's"]
    assert chosen.owner("build_optimizers") is task
    assert [*map(str, chosen.decisions())] == [
        "build_optimizers: the task's, by owners, instead of muon"
    ]


def test_a_choice_among_plugins_names_all_whom_it_passed_over(plugin):
    """Who reads the header shall see what would have trained otherwise."""
    names = ("muon", "lion")
    plugins = [plugin(name, build_optimizers=acts) for name in names]
    task = plugin("task", "task", build_optimizers=acts)
    chosen = arrange([task, *plugins], choosing({"build_optimizers": "muon"}))

    assert [*map(str, chosen.decisions())] == [
        "build_optimizers: muon, by owners, instead of lion and the task's"
    ]


@pytest.mark.parametrize(
    ("owners", "what"),
    [
        ({"build_optimisers": "muon"}, "the closest is 'build_optimizers'"),
        ({"build_optimizers": "mun"}, "owners assigns build_optimizers to 'mun', which doesn't"),
        ({"batch_end": "muon"}, "no action has this name"),
    ],
)
def test_an_owner_that_nobody_is_is_refused(plugin, problems_of, owners, what):
    """A choice that has no effect is a mistake."""
    muon = plugin("muon", build_optimizers=acts)

    (problem,) = problems_of(muon, owners=owners)

    assert what in problem


def test_plugins_that_compare_equal_are_refused(problems_of):
    """Pluggy would register one of them, and drop the other in silence."""
    pair = [Plugin(name, "algorithm", SimpleNamespace(x=1)) for name in ("a", "b")]

    assert problems_of(*pair) == [
        "the plugins a and b compare equal, so that they can't be told apart"
    ]


@pytest.mark.parametrize("answer", [lambda self, other: True, lambda self, other: 1 / 0])
def test_a_plugin_that_equals_anything_is_named_alone(plugin, problems_of, answer):
    """It isn't the others' fault, and least the task's."""
    odd = Plugin("odd", "algorithm", type("Odd", (), {"__eq__": answer, "__hash__": None})())
    others = [plugin(name, batch_end=acts) for name in ("a", "z")]

    (problem,) = problems_of(plugin("task", "task"), others[0], odd, others[1])

    assert problem.startswith("odd compares equal to anything, or can't be compared")


def test_a_misspelt_edge_is_refused_and_one_to_a_stranger_is_not(plugin, problems_of):
    """A plugin may order itself against one that isn't installed; a slip is close to a name."""
    slip = plugin("a", batch_end=(acts, {"after": "mixpu"}))
    stranger = plugin("b", batch_end=(acts, {"after": "cutmix"}))

    like_another = plugin("c", batch_end=(acts, {"before": "export"}))

    assert problems_of(stranger, installed=("ema",)) == []
    assert problems_of(like_another, installed=("report",)) == []
    assert problems_of(slip, installed=("mixup",)) == [
        "no plugin is named 'mixpu'; the closest is 'mixup'"
    ]


def yields(state):
    return (yield)


@pytest.mark.parametrize(
    ("own", "other", "what"),
    [
        (
            {"loss": (yields, {"wrapper": True, "after": "b"})},
            {"loss": acts},
            "after='b' can't hold on loss: a wrapper encloses all plain implementations, including b's",
        ),
        (
            {"loss": (acts, {"before": "b", "conditional": True})},
            {"loss": (yields, {"wrapper": True})},
            "before='b' can't hold on loss: b wraps it",
        ),
        (
            {"batch_end": (acts, {"after": "b"})},
            {"fit_end": acts},
            "after='b' can't hold on batch_end: b doesn't implement it",
        ),
        (
            {"after_loss": (acts, {"before": "b"})},
            {"before_loss": acts},
            "before='b' can't hold on after_loss: b doesn't implement it",
        ),
    ],
)
def test_an_edge_that_cannot_hold_is_refused(plugin, problems_of, own, other, what):
    """It would have no effect, as a phase on a closing event, and its author would rely on it."""
    (problem,) = problems_of(plugin("a", **own), plugin("b", **other))

    assert problem.startswith(what)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"loss": (yields, {"wrapper": True, "before": "b"})}, {"loss": acts}),
        (
            {"loss": (yields, {"wrapper": True, "after": "b"})},
            {"loss": (yields, {"wrapper": True})},
        ),
        ({"before_loss": (acts, {"after": "b"})}, {"after_loss": acts}),
        ({"batch_end": (acts, {"after": "task"})}, {"fit_end": acts}),
        ({"batch_end": (acts, {"after": "c"})}, {"fit_end": acts}),
    ],
)
def test_an_edge_that_holds_or_may_hold_is_not(plugin, problems_of, own, other):
    """Through the event that closes this one, or of a plugin that isn't there today."""
    assert problems_of(plugin("a", **own), plugin("b", **other)) == []


class OwnHooks:
    """What the plugin below lets others do."""

    @hookspec(per="any")
    def ema_updated(self, state, decay):
        """Called after the average moved."""


class Ema:
    """Adds a hook and calls it."""

    name = "ema"
    hookspecs = OwnHooks

    @hookimpl
    def batch_end(self, state):
        state.call("ema_updated", 0.9)


def test_a_plugin_may_add_hooks_that_others_implement(make_trainer, make_plugin):
    """A plugin can have plugins."""
    heard = []
    listener = make_plugin(ema_updated=lambda state, decay: heard.append(decay))

    make_trainer(algorithms=[Ema()], callbacks=[listener], max_duration="2ba").fit()

    assert heard == [0.9, 0.9]


def test_the_loops_own_hooks_are_not_for_plugins_to_call(make_trainer):
    """A second `batch_end` in a batch would be a riddle to everybody."""
    trainer = make_trainer(algorithms=[Ema()])

    with pytest.raises(
        PluginError,
        match="no active plugin declares a hook 'batch_end'; it is an event of the core",
    ):
        trainer.state.call("batch_end")


def test_a_plugin_may_look_at_a_batch_before_it_is_trained_on(make_trainer, make_recorder):
    """What it sees is what the loop sees, in the same precision, and nobody is told."""

    class Looks:
        """Asks for the loss of each batch, and keeps both."""

        def __init__(self):
            self.found, self.trained = [], []

        @hookimpl
        def before_train_batch(self, state):
            state.outputs = state.call("forward")
            self.found.append(state.call("loss").detach())
            state.outputs = None

        @hookimpl
        def after_train_batch(self, state):
            self.trained.append(state.loss)

    looks, recorder = Looks(), make_recorder(["after_forward", "after_loss"])
    make_trainer(algorithms=[looks], callbacks=[recorder], precision="bf16").fit()

    assert torch.equal(torch.stack(looks.found), torch.stack(looks.trained))
    assert len(recorder.seen) == 2 * len(looks.found) == 6


def test_a_callback_that_swallows_an_exception_is_named(make_trainer, make_plugin):
    """It may only watch, and a failure that nobody sees is not watching."""

    class Swallows:
        """Hides failures."""

        @hookimpl(wrapper=True)
        def batch_end(self, state):
            try:
                yield
            except ZeroDivisionError:
                return

    fails = make_plugin("fails", batch_end=lambda state: 1 / 0)

    with pytest.raises(PluginError, match="wrapper of batch_end swallowed an exception") as caught:
        make_trainer(algorithms=[fails], callbacks=[Swallows()]).fit()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


UNSUITABLE = """
from eventloop import hookimpl

class Plugin:
    seen = []

    @hookimpl
    def unsuitable(self, state):
        return f"the batch has {len(state.inputs)} samples" if len(state.inputs) > 1 else None

    @hookimpl
    def batch_end(self, state):
        self.seen.append(state.clock.batch)
"""


def test_an_unsuitable_plugin_stands_off_with_its_reason(make_trainer, install):
    """Installed means active, but not where it can't work; and never silently."""
    install("picky", UNSUITABLE)

    trainer = make_trainer(autoload=True)
    trainer.fit()

    assert [(one.found.name, one.reason) for one in trainer.off if one.found.name == "picky"] == [
        ("picky", f"the batch has {len(next(iter(trainer.state.train_dataloader))[0])} samples")
    ]
    assert "picky" not in [one.name for one in trainer.plugins]


def test_a_plugin_may_stand_off_where_the_loss_is_the_models(make_trainer, make_task, install):
    """Plans are made once more then; what the core has read from the first ones isn't a hook."""
    install("picky", UNSUITABLE)

    def forward(model, inputs):
        return {"loss": model(inputs).square().mean()}

    trainer = make_trainer(make_task(loss=None, forward=forward), autoload=True)
    trainer.fit()

    assert "picky" in [one.found.name for one in trainer.off]
    assert trainer.state.clock.epoch == 1


def test_an_unsuitable_plugin_that_was_asked_for_is_an_error(make_trainer):
    """Who hands it over means it."""

    class Picky:
        """Works with nothing."""

        @hookimpl
        def unsuitable(self, state):
            return "it never suits"

        @hookimpl
        def batch_end(self):
            pass

    with pytest.raises(PluginError, match="picky was asked for, but doesn't suit this task"):
        make_trainer(algorithms=[Picky()])


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_an_owner_and_a_conditional_that_names_alone_order_are_refused(plugin, problems_of, names):
    """Renamed, the plugins would train otherwise."""
    maybe = plugin(names[0], forward=(acts, {"conditional": True}))
    owner = plugin(names[1], forward=acts)

    (problem,) = problems_of(maybe, owner)

    assert problem == (
        f"{names[0]} may take the action forward over and {names[1]} always does; only their "
        "names decide which is asked first"
    )


@pytest.mark.parametrize(
    ("of_conditional", "of_owner"),
    [
        ({"tryfirst": True}, {}),
        ({}, {"trylast": True}),
        ({"before": "b"}, {}),
        ({}, {"after": "a"}),
        ({}, {"before": "a"}),
    ],
)
def test_one_that_phases_or_edges_order_is_not(plugin, problems_of, of_conditional, of_owner):
    """Their authors have said it."""
    maybe = plugin("a", forward=(acts, {"conditional": True, **of_conditional}))
    owner = plugin("b", forward=(acts, of_owner))

    assert problems_of(maybe, owner) == []
    assert problems_of(maybe, plugin("c", forward=(acts, {"conditional": True}))) == []


def test_pluggy_takes_the_core_s_own_plugins(make_trainer, plugin):
    """A run leaves that out, as it would find the same each time."""
    names = [one.name for one in walk_packages(eventloop.__path__, "eventloop.")]
    modules = [import_module(name) for name in names if not name.endswith("__main__")]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    own = sorted((one for one in kinds if _implements(one)), key=lambda one: one.__qualname__)
    as_others = [
        replace(plugin(f"own{idx}"), target=kind.__new__(kind)) for idx, kind in enumerate(own)
    ]
    wrong = plugin("wrong", batch_end=lambda state, rest: None)
    registry = make_trainer().assembly

    assert {Defaults, RankHooks, ProgressLines} < {*own}
    assert refused_by_pluggy(replace(registry, records=tuple(as_others))) == []
    (refused,) = refused_by_pluggy(replace(registry, records=(*as_others, wrong)))
    assert "rest" in refused.what


def _implements(kind: type) -> bool:
    return any(hasattr(one, "eventloop_impl") for one in vars(kind).values())
