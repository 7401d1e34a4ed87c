"""What doesn't fit a hook is found by name before the run."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest

from eventloop import hookimpl
from eventloop.config.configuration import Configuration
from eventloop.config.plugin_flags import Choice
from eventloop.errors import PluginError
from eventloop.plugin.assemble import assemble
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.passed import passed_plugins
from eventloop.plugin.records import FROM_ENTRY_POINT, Plugin
from eventloop.plugin.validate import implementations

ALONE = Configuration(choice=Choice(autoload=False, autoload_reason="a test"))


class Ema:
    @hookimpl
    def before_foward(self, state): ...


def made(target: object, role: str = "algorithm") -> Plugin:
    return Plugin("ema", role, target, "eventloop-ema", "0.2.1", FROM_ENTRY_POINT)


def problem_of(plugin: Plugin) -> str:
    found, (problem,) = implementations(plugin, HOOKS)
    assert found == []
    return str(problem)


def test_an_unknown_hook_is_refused_with_the_closest():
    """A misspelt hook would never be called, and nobody would know."""
    assert problem_of(made(Ema())) == (
        "no hook is named 'before_foward'; the closest is 'before_forward'\n"
        "  plugin  ema (eventloop-ema 0.2.1), method Ema.before_foward\n"
        "  fix     rename the method, list the hooks with `eventloop plugins hooks`, or switch "
        'the plugin off with `disable = ["ema"]` in [tool.eventloop] of pyproject.toml'
    )


MEND = "rename the method, list the hooks with `eventloop plugins hooks`"


@pytest.mark.parametrize(
    ("role", "by", "fix"),
    [
        ("callback", "Trainer", f"{MEND}, or leave the plugin out of `callbacks=[...]`"),
        ("callback", "flag", f"{MEND}, or leave `Task(...)` out"),
        (
            "callback",
            "Task",
            f"{MEND}, or leave it out of Task(callbacks=[...])",
        ),
        ("task", "Trainer", MEND),
    ],
)
def test_the_way_out_is_one(role, by, fix):
    """`disable` knows what is installed, not what was handed over, and never the task."""
    message = problem_of(Plugin("ema", role, Ema(), source="Task(...)", by=by))

    assert message.splitlines()[-1] == f"  fix     {fix}"


def test_a_wrong_argument_is_refused_with_the_closest(plugin):
    """What a hook doesn't pass would be missing at the call."""
    one = plugin("ema", log=lambda state, number: None)

    assert problem_of(one) == (
        "log has no argument 'number'; the closest is 'numbers'\n"
        "  plugin  ema, method SimpleNamespace.log\n"
        "  fix     take only arguments that the hook passes: state, numbers, at, or leave the plugin out of "
        "`algorithms=[...]`"
    )


def yields(state):
    return (yield)


@pytest.mark.parametrize("forward", [lambda state: 1, (yields, {"wrapper": True})])
def test_a_callback_can_not_take_part_in_an_action(plugin, forward):
    """Nor wrap one: it may only watch."""
    assert problem_of(plugin("watch", "callback", forward=forward)) == (
        "a callback can't implement the action forward; it can only watch\n"
        "  plugin  watch, method SimpleNamespace.forward\n"
        "  fix     register it in eventloop.algorithms, or pass it to Trainer(algorithms=...), or "
        "leave the plugin out of `callbacks=[...]`"
    )


@pytest.mark.parametrize("name", [name for name, hook in HOOKS.items() if hook.kind == "question"])
def test_callbacks_answer_the_questions_that_do_not_change_the_training(plugin, name):
    """When to evaluate, save and stop, yes; what is trained on, and whether, no."""
    forbidden = {"should_skip_batch", "should_skip_step", "should_rebuild_dataloader"}
    answer = {name: lambda state: True}

    found, problems = implementations(plugin("watch", "callback", **answer), HOOKS)

    assert (len(found), len(problems)) == ((0, 1) if name in forbidden else (1, 0))
    assert implementations(plugin("cut", "algorithm", **answer), HOOKS)[1] == []


@pytest.mark.parametrize("name", ["exception", "close", "unsuitable", "header_note"])
def test_what_reaches_every_plugin_can_not_be_wrapped(plugin, name):
    """A wrapper could keep others from being told; left out in silence it would be a riddle."""

    def around(state):
        return (yield)

    message = problem_of(plugin("ema", **{name: (around, {"wrapper": True})}))

    assert message.startswith(f"{name} can't be wrapped")


def test_conditional_is_for_actions(plugin):
    """An option without effect is an error: its author believes in one."""
    message = problem_of(plugin("ema", batch_end=(lambda state: None, {"conditional": True})))

    assert message.startswith("conditional=True has no effect on batch_end")


def test_an_optional_hook_may_be_unknown(plugin):
    """A plugin may serve another plugin's hook that isn't installed."""
    one = plugin("ema", no_such_hook=(lambda state: None, {"optionalhook": True}))

    assert implementations(one, HOOKS) == ([], [])


def test_an_optional_hook_that_is_known_is_implemented(plugin):
    """And checked like any other."""
    found, _ = implementations(plugin("a", log=(lambda at: 0, {"optionalhook": True})), HOOKS)

    assert [(one.hook.name, one.argnames) for one in found] == [("log", ("at",))]


def test_specname_names_the_hook(plugin):
    """Two methods of a plugin may implement one hook."""
    one = plugin(
        "ema",
        average=(lambda state: None, {"specname": "batch_end"}),
        batch_end=lambda state: None,
        finish=(lambda state: None, {"specname": "fit_ned"}),
    )

    found, (problem,) = implementations(one, HOOKS)

    assert [each.hook.name for each in found] == ["batch_end", "batch_end"]
    assert "no hook is named 'fit_ned'; the closest is 'fit_end'" in str(problem)
    assert "method SimpleNamespace.finish" in str(problem)


def test_options_and_arguments_are_read(plugin):
    """Everything that order and plan depend on."""

    def around(at, state):
        return (yield)

    found, _ = implementations(
        plugin("a", log=(around, {"wrapper": True}), batch_end=(lambda: 0, {"trylast": True})),
        HOOKS,
    )
    told, logged = sorted(found, key=lambda one: one.hook.name)

    assert (told.argnames, told.phase, told.wrapper, told.logs) == ((), 2, False, True)
    assert (logged.argnames, logged.phase, logged.wrapper, logged.logs) == (
        ("at", "state"), 1, True, True
    )  # fmt: skip


def test_an_argument_with_a_default_is_passed_where_the_hook_has_it(plugin, plan_of, state):
    """As pluggy does; a default that silently won would be a wrong number in a log."""
    told = []
    one = plugin("a", log=lambda state, at=None, numbers=None: told.append((at, numbers)))

    plan_of("log", one)(state, {"x": 1}, "now")

    assert told == [("now", {"x": 1})]


class Defaults:
    @hookimpl
    def log(self, state, number=None): ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda plugin: made(Defaults()), "log has no argument 'number'; the closest is 'numbers'"),
        (
            lambda plugin: plugin("a", log=lambda state, number=None, at=None: None),
            "log has no argument 'number'; the closest is 'numbers'",
        ),
        (lambda plugin: plugin("a", log=lambda at, more=3: None), "log has no argument 'more'"),
        (lambda plugin: plugin("a", batch_end=lambda x=3: None), "batch_end has no argument 'x'"),
    ],
)
def test_an_argument_with_a_default_that_the_hook_does_not_have_is_refused(make, message, plugin):
    """It looks like one that is passed, and has its default for ever."""
    problem = problem_of(make(plugin))

    assert problem.startswith(message)
    assert "store a value of the plugin as an attribute, `self." in problem


def test_a_method_without_self_is_refused():
    """Python would pass the plugin in the place of the State, or fail at the first batch."""

    class Takes:
        @hookimpl
        def batch_end(state): ...

    class Nothing:
        @hookimpl
        def batch_end(): ...

    taken, nothing = problem_of(made(Takes())), problem_of(made(Nothing()))

    assert "first parameter is 'state', which would be the plugin itself" in taken
    assert "write `def batch_end(self, state)`" in taken
    assert "can't take the plugin itself: `self` is missing" in nothing
    assert "write `def batch_end(self)`" in nothing


def test_a_module_implements_hooks_with_functions():
    """A plugin is a class, an instance or a module."""
    module = ModuleType("watch")
    module.batch_end = hookimpl(lambda state: None)

    found, problems = implementations(made(module), HOOKS)

    assert ([one.hook.name for one in found], problems) == (["batch_end"], [])


def test_what_is_not_marked_is_left_alone():
    """A model has a `forward`, and a plugin may have methods of any name."""

    class Plain:
        def batch_end(self, number): ...

        @property
        def raises(self):
            raise RuntimeError

    assert implementations(made(Plain()), HOOKS) == ([], [])


def test_what_looks_like_a_hook_but_is_not_marked_is_refused():
    """The mark is the commonest thing to forget, and the hook would never be called."""

    class Forgot:
        def batch_end(self, state): ...

    assert problem_of(made(Forgot())) == (
        "batch_end is the name of a hook, but this function isn't marked, so it would never be "
        "called\n"
        "  plugin  ema (eventloop-ema 0.2.1), method Forgot.batch_end\n"
        '  fix     put @hookimpl above it, or rename it, or switch the plugin off with `disable = ["ema"]` in [tool.eventloop] of pyproject.toml'
    )


@pytest.mark.parametrize("where", ["class", "instance", "module"])
@pytest.mark.parametrize("hook", ["unsuitable", "header_note"])
def test_a_value_in_place_of_what_a_plugin_says_about_itself_is_refused(hook, where):
    """It is called, so that a text in the class would never be shown."""
    written = {hook: "a text"}
    target = type("Says", (), written if where == "class" else {})()
    if where == "instance":
        vars(target).update(written)
    if where == "module":
        target = ModuleType("says")
        vars(target).update(written)

    message = problem_of(made(target))

    assert message.startswith(f"{hook} is a str, not a method, so it would never be called\n")


def test_all_problems_of_all_plugins_are_told_at_once():
    """Mending one a run is slow."""

    class Watch:
        @hookimpl
        def forward(self, state): ...

        @hookimpl
        def batch_end(self, sate): ...

    with pytest.raises(PluginError) as caught:
        assemble(
            ALONE,
            task=Plugin("task", "task", object()),
            passed=[
                *passed_plugins([Ema()], "algorithm", []),
                *passed_plugins([Watch()], "callback", []),
            ],
        ).raise_problems()

    assert str(caught.value).startswith("3 problems with plugins\n1. no hook is named")
    assert "batch_end has no argument 'sate'; the closest is 'state'" in str(caught.value)
    assert "a callback can't implement the action forward" in str(caught.value)


def test_a_dataclass_with_slots_has_an_option_named_like_a_hook():
    """A slot is no method that was meant to be one."""

    @dataclass(slots=True, eq=False)
    class Slotted:
        loss: float = 0.5

        @hookimpl
        def batch_end(self, state): ...

    found, problems = implementations(made(Slotted()), HOOKS)

    assert ([one.hook.name for one in found], problems) == (["batch_end"], [])
