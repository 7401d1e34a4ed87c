"""The order of calls: a function of what is installed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventloop.plugin.order import order, order_of_owners

FIRST, LAST = {"tryfirst": True}, {"trylast": True}


def hears(state): ...


def wraps(state):
    return (yield)


@pytest.fixture
def everybody(plugin):
    """A plugin for each place in the order of `batch_end`, as they should stand there."""
    return [
        plugin("task", "task", batch_end=hears),
        plugin("z-first", "algorithm", batch_end=(hears, FIRST)),
        plugin("b", "algorithm", batch_end=hears),
        plugin("C", "algorithm", batch_end=hears),
        plugin("a-last", "algorithm", batch_end=(hears, LAST)),
        plugin("y-first", "callback", batch_end=(hears, FIRST)),
        plugin("A", "callback", batch_end=hears),
        plugin("x-last", "callback", batch_end=(hears, LAST)),
        plugin("logs-first", "callback", batch_end=(hears, FIRST), log=hears),
        plugin("a-logs", "callback", batch_end=hears, log=hears),
        plugin("b-logs", "callback", batch_end=hears, log=hears),
        plugin("core", "core", batch_end=(hears, FIRST)),
    ]


def test_role_then_phase_then_name(everybody, names_in_order):
    """Who changes the batch comes before who looks at it, and who writes numbers comes last."""
    expected = [one.name for one in everybody]

    assert names_in_order("batch_end", sorted(everybody, key=lambda one: one.name)) == expected


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_order_never_depends_on_the_order_given(everybody, names_in_order, data):
    """Two machines with the same packages must train alike."""
    shuffled = data.draw(st.permutations(everybody))

    assert names_in_order("batch_end", shuffled) == [one.name for one in everybody]


@pytest.mark.parametrize("names", [["Mix-Up", "mix_up2", "mixa"], ["B", "b1", "B2"]])
def test_names_are_compared_folded(plugin, names_in_order, names):
    """`Ema` and `ema` are one name, so neither case nor dashes may decide."""
    plugins = [plugin(name, batch_end=hears) for name in names]

    for given_order in itertools.permutations(plugins):
        ordered = names_in_order("batch_end", given_order)
        assert ordered == sorted(names, key=lambda name: name.lower().replace("-", "_"))


def test_wrappers_have_the_same_order(plugin, names_in_order):
    """The first of them is the outermost."""
    plugins = [
        plugin("watch", "callback", batch_end=(wraps, {"wrapper": True})),
        plugin("b", batch_end=(wraps, {"wrapper": True})),
        plugin("a", batch_end=(wraps, {"wrapper": True, **LAST})),
        plugin("task", "task", batch_end=(wraps, {"wrapper": True})),
    ]

    assert names_in_order("batch_end", plugins) == ["task", "b", "a", "watch"]


def test_wrappers_enclose_in_order(plugin, plan_of, state):
    """What must be undone is undone in reverse: first in, last out."""
    heard = []

    def wrapper(name):
        def around(state):
            heard.append(name)
            result = yield
            heard.append(name)
            return result

        return around, {"wrapper": True}

    plain = plugin("0", batch_end=lambda state: heard.append("plain"))
    plan_of("batch_end", plugin("b", batch_end=wrapper("b")), plain,
            plugin("a", batch_end=wrapper("a")))(state)  # fmt: skip

    assert heard == ["a", "b", "plain", "b", "a"]


def test_a_logger_is_known_by_the_hook_not_by_the_method(plugin, names_in_order):
    """Whatever its method is called, it writes the numbers that the others log."""
    writes = plugin("a", "callback", batch_end=hears, write=(hears, {"specname": "log"}))

    ordered = names_in_order("batch_end", [writes, plugin("b", "callback", batch_end=hears)])

    assert ordered == ["b", "a"]


def test_an_algorithm_that_logs_stays_with_the_algorithms(plugin, names_in_order):
    """Only those who just write are put last."""
    plugins = [plugin("b", batch_end=hears), plugin("a", batch_end=hears, log=hears)]

    assert names_in_order("batch_end", plugins) == ["a", "b"]


def test_owners_come_in_three_layers(plugin, names_in_order):
    """A plugin replaces the task's answer, and the task the core's, whatever their phases."""
    plugins = [
        plugin("core", "core", forward=(hears, FIRST)),
        plugin("task", "task", forward=(hears, FIRST)),
        plugin("b", forward=(hears, LAST)),
        plugin("a", forward=hears),
    ]

    for given_order in itertools.permutations(plugins):
        owners = names_in_order("forward", given_order, lambda found: order_of_owners(order(found)))

        assert owners == ["a", "b", "task", "core"]


def test_what_started_first_is_closed_last(plugin, names_in_order):
    """A plugin may need another one until it is closed itself."""
    roles = {"a": "algorithm", "b": "algorithm", "c": "callback", "d": "callback"}
    plugins = [plugin(name, role, close=lambda: None) for name, role in roles.items()]

    assert names_in_order("close", plugins) == ["d", "c", "b", "a"]
