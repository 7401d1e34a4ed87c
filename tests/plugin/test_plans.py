"""Plans: what pluggy doesn't have, and what the comparison with it leaves out."""

from __future__ import annotations

import inspect
import traceback
from contextlib import suppress

import pytest

from eventloop.errors import PluginError, ReadOnlyStateError, notes_of
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


def test_a_wrapper_around_nothing_receives_an_empty_list(plan_of, plugin, state):
    """It may add to what it receives, whether anybody else listens or not."""

    def adds(state):
        return [*(yield), True]

    plan = plan_of("should_stop", plugin("p", should_stop=(adds, {"wrapper": True})))

    assert plan(state) is True


# Results that a hook has no use for


@pytest.mark.parametrize("result", [True, ["yes"], (True,)])
def test_a_wrapper_of_a_question_returns_a_list_of_answers(plan_of, plugin, state, result):
    """It stands for what it encloses."""

    def replaces(state):
        yield
        return result

    plan = plan_of("should_stop", plugin("odd", should_stop=(replaces, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"not a list of results\n  plugin  odd\n"):
        plan(state)


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


@pytest.mark.parametrize(("hook", "kind"), [("forward", "action"), ("should_stop", "question")])
def test_a_wrapper_that_forgets_to_return_is_told_by_name(plan_of, plugin, state, hook, kind):
    """A `yield` without `return` is the commonest slip, and loses the result."""

    def forgets(state):
        result = yield
        result = None
        return result

    core = plugin("core", "core", **{hook: lambda state: True})
    plan = plan_of(hook, core, plugin("ema", **{hook: (forgets, {"wrapper": True})}))

    with pytest.raises(PluginError) as caught:
        plan(state)

    assert str(caught.value) == (
        f"the wrapper of the {kind} {hook} returned nothing\n"
        "  plugin  ema\n"
        f"  at      {line_of(forgets)}\n"
        "  fix     return the result of `yield`"
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


def test_a_conditional_wrapper_may_leave_nothing(plan_of, plugin, state):
    """The rule is for those who promise a result."""

    def empties(state):
        yield

    core = plugin("core", "core", forward=core_forward)
    options = {"wrapper": True, "conditional": True}

    assert plan_of("forward", core, plugin("p", forward=(empties, options)))(state) is None


def test_an_action_that_nobody_answers_is_an_error(plan_of, plugin, state):
    """All may pass, but somebody has to do it."""
    maybe = (lambda state: None, {"conditional": True})

    for plan in (plan_of("forward"), plan_of("forward", plugin("p", forward=maybe))):
        with pytest.raises(PluginError, match="no plugin answered the action forward"):
            plan(state)


# Once more


def test_again_runs_what_the_wrapper_encloses(plan_of, plugin, state):
    """A loss over two targets is the same loss, asked twice."""

    def interpolates(state):
        first = yield
        state.outputs = 10
        return first + state.again()

    core = plugin("core", "core", forward=lambda state: state.outputs)
    state.outputs = 1

    plan = plan_of("forward", core, plugin("p", forward=(interpolates, {"wrapper": True})))

    assert plan(state) == 11


def test_again_may_be_asked_before_the_first_time(plan_of, plugin, state):
    """Sharpness-aware methods look ahead, then go."""

    def looks_ahead(state):
        before = state.again()
        return before, (yield)

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("p", forward=(looks_ahead, {"wrapper": True})))

    assert plan(state) == ("core's", "core's")


def test_again_is_each_wrappers_own(plan_of, plugin, state):
    """The outer one repeats the inner one too, the inner one only what it encloses."""
    calls = []

    def twice(name):
        def wrapper(state):
            calls.append(name)
            return [*(yield), *state.again()]

        return wrapper, {"wrapper": True}

    core = plugin("core", "core", forward=lambda state: [calls.append("core")])
    outer, inner = plugin("a", forward=twice("a")), plugin("b", forward=twice("b"))

    assert plan_of("forward", core, outer, inner)(state) == [None] * 4
    assert calls == ["a", "b", "core", "core", "b", "core", "core"]


def test_again_passes_what_the_hook_passed(plan_of, plugin, state):
    """Actions have arguments of their own."""

    def twice(state):
        return (yield) + state.again()

    core = plugin("core", "core", backward=lambda state, loss: loss)
    plan = plan_of("backward", core, plugin("p", backward=(twice, {"wrapper": True})))

    assert plan(state, 3) == 6


def test_again_may_pass_something_else(plan_of, plugin, state):
    """A part of the batch is counted as the whole would be; wrappers further in see the part."""
    seen = []

    def halves(state, loss):
        yield
        return state.again(loss / 2)

    def watches(state, loss):
        seen.append(loss)
        return (yield)

    core = plugin("core", "core", backward=lambda state, loss: loss)
    outer = plugin("a", backward=(halves, {"wrapper": True}))
    inner = plugin("b", backward=(watches, {"wrapper": True}))

    assert plan_of("backward", core, outer, inner)(state, 6) == 3
    assert seen == [6, 3]


def test_again_is_over_where_the_wrapper_ends(plan_of, plugin, state):
    """Also where it ends with an exception; `again` of a loss inside an event would be a riddle."""

    def raises(state):
        yield
        raise Wrong

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("p", forward=(raises, {"wrapper": True})))

    with pytest.raises(Wrong):
        plan(state)
    with pytest.raises(PluginError, match=r"works inside a wrapper of an action only"):
        state.again()


@pytest.mark.parametrize("asked", ["first", "again"])
def test_again_is_not_there_for_what_the_wrapper_encloses(plan_of, plugin, state, asked):
    """It would ask for itself, without end: the first time as well as the second."""
    heard = []

    def twice(state):
        yield
        return state.again()

    def forward(state):
        heard.append("forward")
        return state.again() if len(heard) == (1 if asked == "first" else 2) else 1

    core = plugin("core", "core", forward=forward)
    plan = plan_of("forward", core, plugin("p", forward=(twice, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"works inside a wrapper of an action only"):
        plan(state)
    assert heard == ["forward"] * (1 if asked == "first" else 2)


def test_again_is_not_there_in_what_the_wrapper_calls_in_turn(plan_of, plugin, state):
    """The wrapper of an event would repeat the action around it, which isn't what it encloses."""

    def asks(state):
        state.again()
        yield

    event = plan_of("log", plugin("q", log=(asks, {"wrapper": True})))

    def tells(state):
        event(state, {}, None)
        return (yield)

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("p", forward=(tells, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"works inside a wrapper of an action only"):
        plan(state)


# Wrappers that break the protocol


def test_a_wrapper_that_does_not_yield_is_told_by_name(plan_of, plugin, state):
    """What it should enclose would never run."""

    def never(state):
        if state is None:
            yield
        return 1

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("ema", forward=(never, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"a wrapper didn't yield\n  wrapper  ema, forward"):
        plan(state)


@pytest.mark.parametrize("fails", [False, True])
def test_a_wrapper_that_yields_twice_is_told_and_closed(plan_of, plugin, state, fails):
    """After a result as after an exception; what it holds open must be released."""
    closed = []

    def twice():
        with suppress(Wrong):
            yield
        try:
            yield
        finally:
            closed.append(True)

    def wrapper(state):
        yield from twice()
        return 1

    def forward(state):
        if fails:
            raise Wrong
        return 1

    core = plugin("core", "core", forward=forward)
    plan = plan_of("forward", core, plugin("ema", forward=(wrapper, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"yielded a second time\n  wrapper  ema, forward"):
        plan(state)
    assert closed == [True]


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
    plugins = [plugin(name, unsuitable=lambda text=text: text) for name, text in texts.items()]

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
    plugins = [plugin(one, one, close=lambda one=one: heard.append(one)) for one in roles]
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
        "raised by plugin ema (eventloop-ema 0.2.1) in batch_end, epoch 1, batch 1, rank 0\n"
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
    assert origin == "in the task's forward, epoch 0, batch 0"


def test_the_task_is_named_without_a_way_out(plan_of, plugin, state):
    """Nobody can switch it off, but when it happened is worth a line."""
    one = plugin("task", "task", batch_end=raise_wrong)

    with pytest.raises(Wrong) as caught:
        plan_of("batch_end", one, plugin("other", batch_end=lambda state: None))(state)

    assert caught.value.__notes__ == ["in the task's batch_end, epoch 0, batch 0"]


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
        one = plugin("watch", "callback", batch_end=lambda state, name=name: getattr(state, name))

        with pytest.raises(ReadOnlyStateError, match=f"state.{name} isn't available to a callback"):
            plan_of("batch_end", one)(state)
