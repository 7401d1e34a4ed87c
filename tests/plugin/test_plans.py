"""Plans: what pluggy doesn't have, and what the comparison with it leaves out."""

from __future__ import annotations

import inspect
import traceback

import pytest

from eventloop.errors import PluginError, ReadOnlyStateError, a, notes_of
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.plans import nothing, outcomes_of, unanswered


class Wrong(Exception):
    """What plugins raise here."""


def core_forward(state):
    return "core's"


def line_of(function) -> str:
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


def passes_on(state):
    return (yield)


# Plans that are no more than they must be


def test_where_nobody_listens_nothing_is_called(plan_of):
    """An unused event costs the loop a call of an empty function."""
    assert plan_of("batch_end") is nothing
    assert plan_of("should_stop") is unanswered


def test_an_empty_plan_takes_whatever_the_hook_passes(plan_of, state):
    """The loop calls every plan alike."""
    assert plan_of("log")(state, {}, None) is None
    assert plan_of("should_stop")(state) is False


def test_the_core_alone_is_called_directly(plan_of, plugin):
    """Between the loop and its own default stands nothing."""
    core = plugin("core", "core", forward=core_forward)

    assert plan_of("forward", core) is core.target.forward


# Results that a hook has no use for


# The None rule


def test_an_owner_that_returns_nothing_is_told_by_name(plan_of, plugin, state):
    """A step must never be left undone in silence."""
    forward = lambda state: None  # noqa: E731
    plan = plan_of("forward", plugin("ema", distribution="eventloop-ema", forward=forward))

    with pytest.raises(PluginError) as caught:
        plan(state)

    assert str(caught.value) == (
        "the owner of the action forward returned nothing\n"
        "  plugin  ema (eventloop-ema 0.2.1)\n"
        f"  at      {line_of(forward)}\n"
        "  fix     return the result, or pass with @hookimpl(conditional=True)"
    )


@pytest.mark.parametrize("result", [0, False, "", (), {}])
def test_a_result_that_is_false_is_a_result(plan_of, plugin, state, result):
    """`zero_grad` may give False, a metric 0; only None says that nothing was done."""
    core = plugin("core", "core", forward=core_forward)

    plan = plan_of("forward", plugin("p", forward=lambda state: result), core)

    assert plan(state) is result


def test_a_conditional_implementation_passes_to_the_next(plan_of, plugin, state):
    """One that answers only sometimes lets the task, then the core, answer."""
    maybe = (lambda state: None, {"conditional": True})
    first, second = plugin("a", forward=maybe), plugin("b", forward=maybe)
    task = plugin("task", "task", forward=lambda state: "task's")
    core = plugin("core", "core", forward=core_forward)

    assert plan_of("forward", first, second, task, core)(state) == "task's"
    assert plan_of("forward", first, second, core)(state) == "core's"


def test_after_the_owner_nobody_is_asked(plan_of, plugin, state):
    """What it replaces mustn't act as well."""
    asked = []
    task = plugin("task", "task", forward=lambda state: asked.append("task"))

    plan_of("forward", task, plugin("owner", forward=lambda state: "done"))(state)

    assert asked == []


def test_an_action_that_nobody_answers_is_an_error(plan_of, plugin, state):
    """All may pass, but somebody has to do it."""
    maybe = (lambda state: None, {"conditional": True})

    for plan in (plan_of("forward"), plan_of("forward", plugin("p", forward=maybe))):
        with pytest.raises(PluginError, match="no plugin answered the action forward"):
            plan(state)


# Events


def told_and_returned(state):
    result = yield
    return [*result, 0.5][-1]


@pytest.mark.parametrize("hook", ["batch_end", "log"])
@pytest.mark.parametrize("result", [5, 0, False, "", []])
def test_an_event_that_returns_a_result_is_an_error_that_names_it(
    plan_of, plugin, state, hook, result
):
    """Nothing receives the result, so the author must have meant something else."""

    def told(state):
        return result

    arguments = (state, *HOOKS[hook].argnames[1:])
    quiet = plugin("a", **{hook: lambda state: None})

    with pytest.raises(PluginError) as caught:
        plan_of(hook, quiet, plugin("b", distribution="eventloop-b", **{hook: told}))(*arguments)

    assert str(caught.value) == (
        f"the event {hook} got {a(type(result).__name__)} as a result, which would be lost\n"
        "  plugin  b (eventloop-b 0.2.1)\n"
        f"  at      {line_of(told)}\n"
        "  fix     return nothing; to pass a value on, keep it on the plugin or log it"
    )


def test_a_wrapper_of_an_event_that_returns_a_result_is_an_error(plan_of, plugin, state):
    """A wrapper returns what `yield` gives it, an empty list, or nothing."""
    wrapper = plugin("b", batch_end=(told_and_returned, {"wrapper": True}))

    with pytest.raises(PluginError, match="the event batch_end got a float as a result"):
        plan_of("batch_end", wrapper)(state)


def test_a_result_of_the_event_close_is_an_error_once_all_are_closed(plan_of, plugin, state):
    """`close` and `exception` reach every plugin, whatever another one does."""
    closed = []
    returns = plugin("a", close=lambda state: 5)
    closes = plugin("b", close=lambda state: closed.append("b"))

    errors = plan_of("close", returns, closes)(state)

    assert closed == ["b"]
    assert [str(error).partition(" as a result")[0] for error in errors] == [
        "the event close got an int"
    ]


# Questions


@pytest.mark.parametrize("answer", [1, 0, "yes", [True]])
def test_a_question_takes_true_false_or_nothing(plan_of, plugin, state, answer):
    """A tensor as an answer would make the loop wait for the device."""
    one = plugin("a", should_stop=lambda state: answer)
    other = plugin("b", distribution="eventloop-b", should_stop=lambda state: True)

    with pytest.raises(PluginError) as caught:
        plan_of("should_stop", one, other)(state)

    assert str(caught.value).splitlines()[:2] == [
        f"should_stop was answered with {answer!r}; a question takes True, False or None",
        "  plugin  a",
    ]


@pytest.mark.parametrize("hook", ["unsuitable", "header_note"])
@pytest.mark.parametrize("answer", [1, False, ["text"]])
def test_what_a_plugin_says_about_itself_is_a_text_or_nothing(plan_of, plugin, hook, answer):
    """Another answer would be lost, or be printed as it is."""
    with pytest.raises(PluginError) as caught:
        plan_of(hook, plugin("a", **{hook: lambda: answer}))(None)

    assert str(caught.value).splitlines()[:2] == [
        f"{hook} was answered with {answer!r}; it takes a text or None",
        "  plugin  a",
    ]


def test_what_a_plugin_says_about_itself_stays_with_it(plan_of, plugin):
    """A reason without its plugin would be of no use."""
    texts = {"a": "too small", "b": None, "c": "", "d": "too large"}

    def says(name, text):
        return plugin(name, unsuitable=lambda: text)

    plugins = [says(name, text) for name, text in texts.items()]

    answers = plan_of("unsuitable", *plugins)(None)

    assert [(one.name, text) for one, text in answers] == [("a", "too small"), ("d", "too large")]


def test_everybody_is_asked(plan_of, plugin, state):
    """A plugin may count on being asked; another's yes is not a reason to skip it."""
    asked = []
    first = plugin("a", should_stop=lambda state: asked.append("a") or True)
    second = plugin("b", should_stop=lambda state: asked.append("b"))

    assert plan_of("should_stop", first, second)(state) is True
    assert asked == ["a", "b"]


# Whom `exception` and `close` tell


@pytest.mark.parametrize("hook", ["exception", "close"])
def test_everybody_is_told_whatever_anybody_raises(plan_of, plugin, state, hook):
    """One plugin's failure must not keep another's file open."""
    heard = []

    def raising(name, error):
        def implementation(state):
            heard.append(name)
            raise error

        return plugin(name, **{hook: implementation})

    errors = [Wrong("a"), GeneratorExit("b"), SystemExit("c")]
    plugins = [raising(name, error) for name, error in zip("abc", errors, strict=True)]
    args = () if hook == "close" else (RuntimeError(),)
    failures = outcomes_of(plan_of(hook, *plugins), state, *args)

    assert heard == (["c", "b", "a"] if hook == "close" else ["a", "b", "c"])
    assert failures == (errors[::-1] if hook == "close" else errors)
    assert all(notes_of(one, "origin") for one in failures)


def test_close_reverses_everything(plan_of, plugin, state):
    """The core, callbacks, algorithms, the task; a phase on `close` itself is literal."""
    heard = []
    roles = ["core", "callback", "task", "algorithm"]

    def hears(name):
        return plugin(name, name, close=lambda: heard.append(name))

    plugins = [hears(role) for role in roles]
    phased = plugin("first", close=(lambda: heard.append("first"), {"tryfirst": True}))

    plan_of("close", *plugins, phased)(state)

    assert heard == ["core", "callback", "first", "algorithm", "task"]


def test_exception_passes_the_error_to_everybody(plan_of, plugin, state):
    """Each may write it down, the callbacks with their view."""
    heard = []
    error = Wrong()
    one = plugin("a", exception=lambda state, error: heard.append(error))
    other = plugin("b", "callback", exception=lambda error: heard.append(error))

    outcomes_of(plan_of("exception", one, other), state, error)

    assert heard == [error, error]


# Blame


def raise_wrong(state):
    raise Wrong("wrong")


def test_an_exception_gains_a_note_that_names_the_plugin(plan_of, plugin, state):
    """Among twenty plugins, whose was it, when, and how to go on without it."""
    state.clock.end_epoch()
    state.clock.end_batch(4, 0, 0.1)
    one = plugin("ema", distribution="eventloop-ema", batch_end=raise_wrong)

    with pytest.raises(Wrong) as caught:
        plan_of("batch_end", one)(state)

    assert caught.value.__notes__ == [
        "raised by plugin ema (eventloop-ema 0.2.1) in batch_end, epoch 2, batch 1, rank 0\n"
        f"  at   {line_of(raise_wrong)}\n"
        '  fix  switch the plugin off with `disable = ["ema"]` in [tool.eventloop] of pyproject.toml'
    ]


def test_type_and_traceback_stay(plan_of, plugin, state):
    """A debugger must stop where the plugin raised, and `except Wrong` must see it."""
    with pytest.raises(Wrong) as caught:
        plan_of("batch_end", plugin("ema", batch_end=raise_wrong))(state)

    assert caught.value.args == ("wrong",)
    innermost = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert innermost.name == "raise_wrong"
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_the_note_is_added_once_however_many_plans_pass_it_on(plan_of, plugin, state):
    """An event inside a wrapped action inside a wrapped action: the raiser alone is to blame."""
    inner = plan_of("before_forward", plugin("culprit", before_forward=raise_wrong))
    wrapper = plugin("bystander", train_batch=(passes_on, {"wrapper": True}))
    owner = plugin("owner", train_batch=lambda state: inner(state))

    with pytest.raises(Wrong) as caught:
        plan_of("train_batch", wrapper, owner)(state)

    (note,) = caught.value.__notes__
    assert note.startswith("raised by plugin culprit in before_forward")


@pytest.mark.parametrize("half", ["first", "second", "replaced"])
def test_a_wrapper_is_blamed_for_what_it_raises(plan_of, plugin, state, half):
    """In either half, and for the exception that it puts in place of another's."""

    def raises(state):
        if half == "first":
            raise KeyError
        try:
            yield
        except Wrong as error:
            raise KeyError from error
        raise KeyError

    one = plugin("a", batch_end=(raises, {"wrapper": True}))
    other = plugin("b", batch_end=raise_wrong if half == "replaced" else lambda state: None)

    with pytest.raises(KeyError) as caught:
        plan_of("batch_end", one, other)(state)

    assert [note.partition(",")[0] for note in caught.value.__notes__] == [
        "raised by plugin a in batch_end"
    ]


def test_a_wrapper_is_not_blamed_for_what_it_passes_on(plan_of, plugin, state):
    """What the task raises passes through wrappers of plugins that are all innocent."""

    def raises_it_again(state):
        try:
            return (yield)
        except Wrong:
            raise

    task = plugin("task", "task", forward=raise_wrong)
    wrappers = [
        plugin("a", forward=(passes_on, {"wrapper": True})),
        plugin("b", forward=(raises_it_again, {"wrapper": True})),
    ]

    with pytest.raises(Wrong) as caught:
        plan_of("forward", task, *wrappers)(state)

    given, origin = caught.value.__notes__
    assert given.startswith("forward was given")
    assert origin == "in the task's forward, epoch 1, batch 0"


def test_the_task_is_named_without_a_way_out(plan_of, plugin, state):
    """Nobody can switch it off, but when it happened is worth a line."""
    one = plugin("task", "task", batch_end=raise_wrong)

    with pytest.raises(Wrong) as caught:
        plan_of("batch_end", one, plugin("other", batch_end=lambda state: None))(state)

    assert caught.value.__notes__ == ["in the task's batch_end, epoch 1, batch 0"]


def test_the_core_is_not_blamed(plan_of, plugin, state):
    """Nobody can switch it off; the traceback says enough."""
    one = plugin("core", "core", batch_end=raise_wrong)

    with pytest.raises(Wrong) as caught:
        plan_of("batch_end", one, plugin("other", batch_end=lambda state: None))(state)

    assert not hasattr(caught.value, "__notes__")


def test_notes_of_others_stay(plan_of, plugin, state):
    """An exception may come with notes of its own, whatever they say: only ours name a plugin."""
    mine = "raised by plugin board, they say"

    def noted(state):
        error = Wrong()
        error.add_note(mine)
        raise error

    with pytest.raises(Wrong) as caught:
        plan_of("batch_end", plugin("ema", batch_end=noted))(state)

    assert caught.value.__notes__[0] == mine
    assert caught.value.__notes__[1].startswith("raised by plugin ema in batch_end")


# What callbacks are given


def test_a_callback_can_not_assign(plan_of, plugin, state):
    """Read-only means read-only; the message names who tried, where, and what."""

    def assigns(state):
        state.outputs = 1

    one = plugin("watch", "callback", "eventloop-watch", batch_end=assigns)

    with pytest.raises(ReadOnlyStateError) as caught:
        plan_of("batch_end", one)(state)

    assert str(caught.value).splitlines()[:2] == [
        "a callback assigned state.outputs, but it may only read",
        "  plugin  watch (eventloop-watch 0.2.1), batch_end",
    ]
    assert state.outputs is None


def test_a_callback_has_no_means_to_change_what_is_drawn_or_done(plan_of, plugin, state):
    """A generator that it used would change another's draws."""
    for name in ("generator", "again", "_generators"):

        def read(state):
            getattr(state, name)

        one = plugin("watch", "callback", batch_end=read)

        with pytest.raises(ReadOnlyStateError, match=f"state.{name} isn't available to a callback"):
            plan_of("batch_end", one)(state)
