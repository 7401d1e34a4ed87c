"""Hooks that plugins declare are hooks like the core's: called, owned, ordered, named in errors."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pluggy
import pytest
import torch

from eventloop import PluginError, hookimpl, hookspec
from eventloop.config.configuration import Configuration
from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Choice
from eventloop.config.plugin_rules import Rules
from eventloop.errors import notes_of
from eventloop.plugin.assemble import assemble
from eventloop.plugin.observe import Around
from eventloop.plugin.records import Plugin
from eventloop.plugin.registry import arrange
from eventloop_testing import isolated_trainer, run_ranks


class Specs:
    """A hook of each kind."""

    @hookspec(per="any")
    def ema_moved(self, state, decay, num_steps=1):
        """Called after the averages have moved."""

    @hookspec(per="any")
    def should_move(self, state):
        """Asks whether the averages should move."""

    @hookspec(per="any", firstresult=True)
    def next_decay(self, state):
        """Returns the decay."""

    @hookspec(per="any", collection=True)
    def extra_terms(self, state, scale=2.0):
        """Returns a term, or None."""


class Ema:
    """Declares them."""

    name = "ema"
    hookspecs = Specs


@pytest.fixture
def call(make_trainer, make_plugin):
    """Calls a hook of `Ema`, with functions that implement it, as an algorithm would."""

    def call(hook, *functions, args=(), given=None, **trainer):
        plugins = [
            make_plugin(f"p{idx}", **{hook: function}) for idx, function in enumerate(functions)
        ]
        state = make_trainer(algorithms=[Ema(), *plugins], **trainer).state
        return state.call(hook, *args, **(given or {}))

    return call


# What a call means


def test_a_collection_returns_the_results_that_are_not_none(call):
    """Pluggy's default, in the order of the plugins."""
    functions = [lambda state: 1, lambda state: None, lambda state: 0]

    assert call("extra_terms", *functions) == [1, 0]
    assert call("extra_terms") == []


def test_each_kind_has_its_result(call):
    """What `state.call` returns depends on the declaration alone, not on who listens."""
    assert call("ema_moved", args=(0.9,)) is None
    assert call("ema_moved", lambda state: None, args=(0.9,)) is None
    assert call("should_move") is False
    assert call("should_move", lambda state: None, lambda state: True) is True
    assert call("next_decay", lambda state: 0.5) == 0.5


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_event_that_returns_something_names_the_plugin(make_trainer, make_plugin, is_wrapped):
    """Lost in silence before, or a list as soon as a third plugin wrapped the event."""

    class Around:
        """Wraps the event."""

        @hookimpl(wrapper=True)
        def ema_moved(self, state):
            return (yield)

    returns = make_plugin("returns", ema_moved=lambda state: 7)
    around = [Around()] if is_wrapped else []
    state = make_trainer(algorithms=[Ema(), returns, *around]).state

    with pytest.raises(PluginError, match="ema_moved got an int as a result") as caught:
        state.call("ema_moved", 0.9)

    assert "plugin  returns (Trainer(algorithms=...))" in str(caught.value)


@pytest.mark.parametrize("options", [{"firstresult": True, "collection": True}])
def test_a_hook_is_of_one_kind(options):
    """A call could mean either."""
    with pytest.raises(ValueError, match="can't be two kinds of hook"):
        hookspec(per="any", **options)(Specs.ema_moved)
    with pytest.raises(ValueError, match="can't be two kinds of hook"):
        hookspec(per="any", collection=True)(Specs.should_move)


# Arguments


@pytest.mark.parametrize(
    ("args", "given"),
    [((0.9,), {}), ((), {"decay": 0.9}), ((0.9, 1), {}), ((0.9,), {"num_steps": 1})],
)
def test_arguments_come_by_position_or_name_with_the_specs_defaults(call, args, given):
    """A default that the declaration has is delivered, as pluggy does."""
    seen = []

    call("ema_moved", lambda num_steps, decay: seen.append((decay, num_steps)),
         args=args, given=given)  # fmt: skip

    assert seen == [(0.9, 1)]


def test_the_specs_default_wins_over_the_implementations(call):
    """As in pluggy 1.7."""
    seen = []

    def implementation(state, num_steps=5):
        seen.append(num_steps)

    call("ema_moved", implementation, args=(0.9,))

    assert seen == [1]


@pytest.mark.parametrize(
    ("args", "given", "what"),
    [
        ((), {}, "missing a required argument: 'decay'"),
        ((0.9, 1, 2), {}, "too many positional arguments"),
        ((0.9,), {"decy": 1}, "got an unexpected keyword argument 'decy'"),
        ((0.9,), {"decay": 1}, "multiple values for argument 'decay'"),
    ],
)
def test_other_arguments_are_an_error_that_shows_the_declaration(call, args, given, what):
    """They came through unchecked, to fail in one plugin or to be dropped."""
    with pytest.raises(PluginError, match=what) as caught:
        call("ema_moved", args=args, given=given)

    assert "hook  ema_moved(state, decay, num_steps=1)" in str(caught.value)


# Owners, order, every, trace, blame


def owners_of(plugins, **rules):
    registry = arrange(plugins, Rules(**rules))
    return registry, [str(problem) for problem in registry.problems]


def test_the_line_that_the_error_proposes_chooses_the_owner(plugin):
    """It was refused: no action had this name."""
    ema = Plugin("ema", "algorithm", Ema())
    two = [plugin(name, next_decay=lambda state: 1) for name in ("a", "b")]

    _, (problem,) = owners_of([ema, *two])
    assert '[tool.eventloop.owners]\nnext_decay = "a"' in problem

    registry, problems = owners_of([ema, *two], owners={"next_decay": Value("a", "a test")})

    assert problems == []
    assert registry.owner("next_decay").name == "a"


def test_a_persons_order_counts_for_a_plugins_hook(plugin):
    """As for the core's."""
    ema = Plugin("ema", "algorithm", Ema())
    two = [plugin(name, ema_moved=lambda state: None) for name in ("a", "b")]
    orders = ({"ema_moved": Value(["b", "a"], "a test")},)

    registry, problems = owners_of([ema, *two], orders=orders)

    assert problems == []
    assert [one.plugin.name for one in registry.implementations["ema_moved"]] == ["b", "a"]


def test_a_plugins_hook_is_traced_and_blamed(make_trainer, make_plugin):
    """The failure of a plugin within another's call is its own."""
    called = []
    around = Around(lambda plugin, hook, state: nullcontext(called.append((plugin, hook))))
    fails = make_plugin("fails", extra_terms=lambda state: 1 / 0)
    state = make_trainer(algorithms=[Ema(), fails], observers=[around]).state

    with pytest.raises(ZeroDivisionError) as caught:
        state.call("extra_terms")

    assert ("fails", "extra_terms") in called
    (note,) = notes_of(caught.value, "origin")
    assert note.startswith("raised by plugin fails (Trainer(algorithms=...)) in extra_terms, epoch")


def test_again_is_not_there_for_what_a_wrapper_calls(make_trainer, make_plugin):
    """The plain implementation of an event would repeat the action around it."""

    class Wraps(Ema):
        """Calls an event in the middle of an action."""

        @hookimpl(wrapper=True)
        def forward(self, state):
            state.call("ema_moved", 0.9)
            result = yield
            assert state.again() is not None
            return result

    asks = make_plugin("asks", ema_moved=lambda state: state.again())

    with pytest.raises(PluginError, match="inside a wrapper of an action only"):
        make_trainer(algorithms=[Wraps(), asks]).fit()
    make_trainer(algorithms=[Wraps()]).fit()


class Penalizes(Ema):
    """Asks for terms in each microbatch, and says when it has."""

    @hookimpl(wrapper=True)
    def loss(self, state):
        loss = yield
        terms = state.call("extra_terms", scale=1.0)
        state.call("ema_moved", decay=len(terms))
        return loss + sum(terms)


class Square:
    """Has a term, and its share of the state."""

    name = "square"

    def __init__(self):
        self.num_calls = 0

    @hookimpl
    def extra_terms(self, state, scale):
        self.num_calls += 1
        return scale * state.outputs.square().mean()

    def state_dict(self):
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state, version):
        self.num_calls = state["num_calls"]


class HearsOnce:
    """Listens on rank 0 alone."""

    name = "hears-once"

    def __init__(self):
        self.heard = []

    @hookimpl(rank_zero=True)
    def ema_moved(self, state, decay):
        self.heard.append((state.rank, decay))


def fit_with_terms(folder, **given):
    """Trains on this rank; returns the weights, what was heard and how often a term was asked."""
    square, hears = Square(), HearsOnce()
    with isolated_trainer(
        folder, algorithms=[Penalizes(), square], callbacks=[hears], microbatch_size=1, **given
    ) as trainer:
        trainer.fit()
        weights = [param.detach().clone() for param in trainer.state.model.parameters()]
        return torch.cat([one.flatten() for one in weights]), hears.heard, square.num_calls


def test_ranks_and_microbatches_call_hooks_of_plugins_alike(tmp_path):
    """Each rank asks for each of its microbatches; `rank_zero` is heard on one."""
    (first, heard, num_calls), (second, unheard, others) = run_ranks(fit_with_terms, tmp_path)

    assert torch.equal(first, second)
    assert (heard, unheard) == ([(0, 1)] * num_calls, [])
    assert num_calls == others == 8  # two batches of four samples each, of three in all


def test_a_resumed_run_calls_hooks_of_plugins_as_one_in_one_go(tmp_path):
    """Declarations are read anew; what implements them goes on with its state."""
    whole, _, num_calls = fit_with_terms(tmp_path / "whole", max_duration="2ep")
    fit_with_terms(
        tmp_path / "parts", max_duration="2ep", checkpoint_interval="2ba", checkpoint_keep=9
    )
    resumed, heard, num_more = fit_with_terms(
        tmp_path / "resumed",
        max_duration="2ep",
        resume=str(tmp_path / "parts" / "run" / "checkpoints" / "ba00000002"),
    )

    assert torch.equal(whole, resumed)
    assert num_calls == num_more == 24
    assert len(heard) == 16


# Sharing


class Widened(Specs):
    """Has the hooks of another class, and one more."""

    @hookspec(per="any")
    def ema_reset(self, state):
        """Called after the averages have been set back."""


def test_plugins_share_one_class_of_hookspecs(make_trainer, make_plugin):
    """What several call, and others implement, is one hook."""
    declaring = [type(name, (), {"hookspecs": specs})() for name, specs in
                 [("One", Specs), ("Two", Specs), ("Three", Widened)]]  # fmt: skip
    terms = make_plugin("terms", extra_terms=lambda state: 1)

    trainer = make_trainer(algorithms=[*declaring, terms])

    assert trainer.state.call("extra_terms") == [1]
    hooks = trainer.assembly.hooks
    assert hooks["extra_terms"].declared_by == ("one", "three", "two")
    assert hooks["ema_reset"].declared_by == ("three",)


def test_a_module_may_declare_and_implement(make_trainer):
    """A module that is its own `hookspecs` declares; its declarations aren't unmarked methods."""
    module = ModuleType("ema_module")
    spec = hookspec(per="any", collection=True)(lambda_named("module_terms"))
    module.module_terms, module.hookspecs = spec, module
    spec.__module__ = "ema_module"

    state = make_trainer(algorithms=[module]).state

    assert state.call("module_terms") == []


def test_a_static_method_declares_as_any_other(make_trainer):
    """It was passed over, though pluggy reads it."""

    class Static:
        @staticmethod
        @hookspec(per="any", collection=True)
        def static_terms(state, scale=1.0):
            """Returns a term."""

    declares = type("Declares", (), {"hookspecs": Static})()

    assert make_trainer(algorithms=[declares]).state.call("static_terms") == []


def lambda_named(name):
    scope = {}
    exec(f"def {name}(state): 'Returns a term.'", scope)
    return scope[name]


# What fit refuses, and check finds


class Empty:
    """Declares nothing."""


class PluggysOwn:
    """Is marked with the wrong marker."""

    @pluggy.HookspecMarker("eventloop")
    def ema_moved(self, state): ...


class Reused:
    """Has a name of the core's."""

    @hookspec(per="batch")
    def batch_end(self, state): ...


class Stateless:
    """Doesn't take the State."""

    @hookspec(per="any")
    def ema_moved(self, decay): ...


class KeywordOnly:
    """Takes what pluggy doesn't pass."""

    @hookspec(per="any")
    def ema_moved(self, state, *, decay): ...


class ClosesNothing:
    """Ends what never begins."""

    @hookspec(per="any", closes="ema_begins")
    def ema_moved(self, state): ...


def _yields(self, state):
    return (yield)


def _returns(self, state):
    return True


OLD = pluggy.HookimplMarker("eventloop")
REFUSED = {
    "no hooks": ({"hookspecs": Empty}, "hookspecs of p declares no hooks"),
    "pluggy's marker": ({"hookspecs": PluggysOwn}, "marked with pluggy's own HookspecMarker"),
    "a core name": ({"hookspecs": Reused}, "'batch_end' of p is declared by the core already"),
    "no state": ({"hookspecs": Stateless}, "doesn't take `state` first"),
    "keyword-only": (
        {"hookspecs": KeywordOnly},
        "takes decay, which no implementation would receive",
    ),
    "closes nothing": ({"hookspecs": ClosesNothing}, "closes 'ema_begins', but no event has"),
    "hookwrapper on a plain function": (
        {"batch_end": OLD(_returns, hookwrapper=True)},
        "hookwrapper=True, the older kind of wrapper",
    ),
    "both kinds of wrapper": (
        {"batch_end": OLD(_yields, hookwrapper=True, wrapper=True)},
        "hookwrapper=True, the older kind of wrapper",
    ),
}


@pytest.fixture
def refused(request, make_plugin):
    """A plugin that can't take part, and what should be said of it."""
    attributes, what = REFUSED[request.param]
    return type("P", (), {"name": "p"} | attributes)(), what


@pytest.mark.parametrize("refused", REFUSED, indirect=True)
def test_a_run_refuses_it_by_name(make_trainer, refused):
    """A bare ValueError of pluggy's said which namespace, and not which plugin."""
    target, what = refused

    with pytest.raises(PluginError, match=r"p \(Trainer\(algorithms=...\)\)") as caught:
        make_trainer(algorithms=[target])

    assert what in str(caught.value)


SOURCE = """
import sys
from {module} import REFUSED
Plugin = type("Plugin", (), {{"name": "p"}} | REFUSED[{key!r}][0])
"""


@pytest.mark.parametrize("key", REFUSED)
def test_check_finds_what_a_run_refuses(install, monkeypatch, key):
    """Its "no problems" has to mean that a run starts."""
    monkeypatch.setitem(sys.modules, "refused_here", SimpleNamespace(REFUSED=REFUSED))
    install("p", SOURCE.format(module="refused_here", key=key))

    registry = assemble(Configuration.read({}))

    (problem,) = registry.problems_of(registry.find("p"))
    assert REFUSED[key][1] in problem.what


# Names that no hook has


IMPLEMENTS = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def loss_terms(self, state): ...
"""
DECLARES = """
from eventloop import hookspec
from terms_api_test import Terms as Specs

class Plugin:
    hookspecs = Specs
"""
API = """
from eventloop import hookspec

class Terms:
    @hookspec(per="batch", collection=True)
    def loss_terms(self, state):
        "Returns a term."
"""


@pytest.fixture
def declaring(install, tmp_path):
    """A plugin whose hooks another package declares, and one that implements one of them."""
    install("uses", IMPLEMENTS)
    install("declares", DECLARES)
    (tmp_path / "site" / "terms_api_test.py").write_text(API)


def test_an_error_says_which_plugin_that_is_off_declares_the_hook(declaring):
    """The hook isn't misspelt; it went with the plugin that declares it. Nothing of it is imported."""
    registry = assemble(Configuration.read({}, choice=Choice(off=("declares",))))

    (problem,) = registry.problems_of(registry.find("uses"))
    assert problem.what == (
        "no hook is named 'loss_terms'; the plugin declares declares it, but is off: -p no:declares"
    )
    assert problem.fix.startswith("switch that plugin on, mark the method with @hookimpl(optional")
    assert "eventloop_declares_module" not in sys.modules


def test_an_error_says_that_no_package_declares_a_hook(install):
    """The one that did was uninstalled; there is nothing to rename."""
    install("uses", IMPLEMENTS)

    registry = assemble(Configuration.read({}))

    (problem,) = registry.problems_of(registry.find("uses"))

    assert problem.what == ("no hook is named 'loss_terms', and no installed plugin declares it")
    assert problem.fix.startswith("install the package that declares it, mark the method with")


def test_order_and_owners_may_name_a_hook_whose_plugin_is_off(declaring, clean):
    """Switching a plugin off for one run takes no edit of the project's file."""
    (clean / "pyproject.toml").write_text(
        "[tool.eventloop.order]\nloss_terms = ['uses']\n"
        "[tool.eventloop.owners]\nloss_terms = 'uses'\n"
    )

    registry = assemble(Configuration.read({}, choice=Choice(off=("declares", "uses"))))

    assert registry.problems == ()


def test_a_call_of_an_unknown_hook_says_what_is_known_of_the_name(make_trainer):
    """A slip, or a hook that is the loop's to call."""
    state = make_trainer(algorithms=[Ema()]).state

    with pytest.raises(
        PluginError, match="no active plugin declares a hook 'extra_term'; the clos"
    ):
        state.call("extra_term")
    with pytest.raises(PluginError, match="'batch_end'; it is an event of the core"):
        state.call("batch_end")
