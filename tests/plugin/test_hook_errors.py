"""A report of a hang names the plugin and the hook whose code runs, however it is wrapped."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from types import ModuleType

import pytest
import torch

from eventloop import hookimpl
from eventloop.distributed.thread_location import line_of_error, line_of_thread
from eventloop.plugin import hook_errors
from eventloop.plugin.records import Plugin


def fail(*_):
    raise LookupError("on purpose")


def place(plan, *args):
    """Says where a plan failed, as a report does."""
    with pytest.raises(LookupError) as failure:
        plan(*args)
    return line_of_error(failure.value).partition(", at ")[0]


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def undeclared(function):
    def inner(self, state):
        return function(self, state)

    return inner


def stopping(function):
    @functools.wraps(function)
    def inner(*args):
        fail()

    return inner


def with_method(decorator=lambda function: function, **options):
    """Makes a class whose instances fail if they are told to."""

    class Fails:
        def __init__(self, *, fails: bool) -> None:
            self.fails = fails

        @hookimpl(**options)
        @decorator
        def batch_end(self, state):
            if self.fails:
                fail()

    return Fails


@pytest.mark.parametrize("names", [("aa",), ("aa", "bb"), ("aa", "bb", "cc")])
def test_each_of_the_plugins_of_an_event_is_named_where_it_hangs(plugin, plan_of, state, names):
    """With exactly two, the report named the first, whichever hung."""
    for culprit in names:
        inside, release = threading.Event(), threading.Event()

        def hanging(inside, release):
            def hang(state):
                inside.set()
                release.wait()

            return hang

        hang = hanging(inside, release)

        hooks = {name: hang if name == culprit else lambda state: None for name in names}
        plan = plan_of("batch_end", *(plugin(name, batch_end=one) for name, one in hooks.items()))
        thread = threading.Thread(target=plan, args=(state,))
        thread.start()
        assert inside.wait(60)

        found = line_of_thread(thread.ident)

        release.set()
        thread.join()
        assert found.startswith(f"in batch_end of algorithm {culprit}, at ")


@pytest.mark.parametrize(
    "decorator", [lambda function: function, decorated, undeclared, torch.no_grad()]
)
def test_instances_of_one_class_are_told_apart(plan_of, state, decorator):
    """They share their code; the first argument decides, also behind a decorator."""
    kind = with_method(decorator)
    plan = plan_of(
        "batch_end",
        Plugin("aa", "algorithm", kind(fails=False)),
        Plugin("bb", "algorithm", kind(fails=True)),
    )

    assert place(plan, state) == "in batch_end of algorithm bb"


def test_a_decorator_that_fails_is_its_plugin_s(plan_of, state):
    """The method itself isn't reached then."""
    one = Plugin("aa", "algorithm", with_method()(fails=False))
    other = Plugin("bb", "algorithm", with_method(stopping)(fails=False))

    assert place(plan_of("batch_end", one, other), state) == "in batch_end of algorithm bb"


def test_functions_that_nothing_tells_apart_are_both_named(plan_of, state):
    """One function under two names: either may be meant, and the report says so."""

    def batch_end(state):
        fail()

    plugins = []
    for name in ("aa", "bb"):
        module = ModuleType(name)
        module.batch_end = hookimpl(batch_end)
        plugins.append(Plugin(name, "algorithm", module))

    found = place(plan_of("batch_end", *plugins), state)

    assert found == "in batch_end of algorithm aa or algorithm bb"


def test_an_object_that_a_plugin_keeps_for_itself_is_not_taken_for_another_plugin(plan_of, state):
    """Its class is that of another plugin; who called it is named."""
    kind = with_method()

    class Outer:
        inner = kind(fails=True)

        @hookimpl
        def batch_end(self, state):
            self.inner.batch_end(state)

    plan = plan_of(
        "batch_end",
        Plugin("aa", "algorithm", kind(fails=False)),
        Plugin("bb", "algorithm", Outer()),
    )

    assert place(plan, state) == "in batch_end of algorithm bb"


def test_an_implementation_that_runs_now_and_then_is_named(plan_of, state):
    """`every=` puts a function of the core in between."""
    kind = with_method(every="1ba")
    plan = plan_of(
        "batch_end",
        Plugin("aa", "algorithm", kind(fails=False)),
        Plugin("bb", "algorithm", kind(fails=True)),
    )
    state.clock.end_batch(1, 1, 0.0)

    assert place(plan, state) == "in batch_end of algorithm bb"


@pytest.mark.parametrize(
    ("fails_before", "fails_inside", "culprit"),
    [(True, False, "aa"), (False, True, "bb"), (False, False, "aa")],
)
def test_a_wrapper_is_named_for_its_own_code_alone(
    plugin, plan_of, state, fails_before, fails_inside, culprit
):
    """What it encloses is named while that runs, and the wrapper again behind its yield."""

    def around(state):
        if fails_before:
            fail()
        yield
        fail()

    def inside(state):
        if fails_inside:
            fail()

    plan = plan_of(
        "batch_end",
        plugin("aa", batch_end=(around, {"wrapper": True})),
        plugin("bb", batch_end=inside),
    )

    assert place(plan, state) == f"in batch_end of algorithm {culprit}"


def test_the_map_keeps_no_plugin(plan_of):
    """It outlives every run, and a plugin may hold as much as a model."""
    made = with_method()(fails=False)
    code, gone = type(made).batch_end.__code__, weakref.ref(made)
    plan = plan_of("batch_end", Plugin("aa", "algorithm", made))
    assert code in hook_errors._MAP

    del plan, made
    gc.collect()

    assert gone() is None


def note_of(plan, state):
    with pytest.raises(Exception) as failure:  # noqa: PT011
        plan(state)
    return failure.value.__notes__[-1]


def test_after_an_exception_in_the_users_own_plugin_its_line_is_named(plugin, plan_of, state):
    """Leaving the plugin out isn't what its author wants."""
    line = fail.__code__.co_firstlineno + 1

    note = note_of(plan_of("batch_end", plugin("own", batch_end=lambda state: fail())), state)

    assert f"\n  fix  correct the plugin's code at {__file__}:{line}" in note
    assert "leave" not in note


def test_an_own_package_in_development_is_the_users_own_plugin(plugin, plan_of, state):
    """An editable installation lies where its author edits it."""
    one = plugin("own", distribution="eventloop-own-test", batch_end=lambda state: fail())

    assert "correct the plugin's code" in note_of(plan_of("batch_end", one), state)


@pytest.mark.parametrize(
    ("file", "distribution"),
    [("/venv/lib/site-packages/other/plugin.py", "other"), ("/clone/plugin.py", "eventloop-ema")],
)
def test_after_an_exception_in_an_installed_plugin_it_can_be_switched_off(
    file, distribution, plugin, plan_of, state
):
    """Its user didn't write the code, and can't change it."""
    scope = {}
    exec(compile("def batch_end(state):\n    1 / 0\n", file, "exec"), {"__name__": "m"}, scope)
    one = plugin("other", distribution=distribution, **scope)

    note = note_of(plan_of("batch_end", one), state)

    assert "correct" not in note
    assert "switch the plugin off with" in note


def test_an_error_that_says_what_to_do_gets_no_second_advice(plugin, plan_of, state):
    """A callback that reads what it can't is told how to write it."""
    one = plugin("own", "callback", batch_end=lambda state: state.global_step)

    note = note_of(plan_of("batch_end", one), state)

    assert "raised by plugin own" in note
    assert "fix" not in note


@pytest.mark.parametrize(
    ("hook", "at", "epoch"),
    [
        ("fit_start", 1, "epoch 1, batch 0"),
        ("epoch_start", 1, "epoch 1, batch 0"),
        ("epoch_start", 2, "epoch 2, batch 3"),
        ("before_dataloader", 4, "epoch 2, batch 4"),
        ("before_forward", 4, "epoch 2, batch 4"),
        ("batch_end", 3, "epoch 1, batch 3"),
        ("epoch_end", 1, "epoch 1, batch 3"),
        ("epoch_checkpoint", 2, "epoch 2, batch 6"),
        ("fit_end", 1, "epoch 2, batch 6"),
    ],
)
def test_messages_and_progress_count_epochs_from_the_same_number(hook, at, epoch, make_trainer):
    """`epoch 1/2` in the line above, and `epoch 0` in the error below, would be one and the same."""

    class Fails:
        calls = 0

    def told(self, state):
        self.calls += 1
        if self.calls == at:
            raise LookupError("on purpose")

    setattr(Fails, hook, hookimpl(told))

    with pytest.raises(LookupError) as failure:
        make_trainer(callbacks=[Fails()], max_duration="2ep").fit()

    assert f"in {hook}, {epoch}, rank 0" in "\n".join(failure.value.__notes__)
