"""Edges and pairs: who wished which order, and what became of it."""

from __future__ import annotations

import itertools
import random

import pytest

from eventloop.errors import PluginError
from eventloop.hook_markers import Edge
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.order import order
from eventloop.plugin.validate import implementations

PHASES = ({}, {"tryfirst": True}, {"trylast": True})


def hears(state): ...


@pytest.fixture
def ordered(plugin):
    """Orders one hook of plugins; gives what `order` gives."""

    def ordered(hook, *plugins, user_edges=(), opener_edges=()):
        found = [one for each in plugins for one in implementations(each, HOOKS)[0]]
        by_hook = {name: [one for one in found if one.hook.name == name] for name in HOOKS}
        opener = by_hook.get(HOOKS[hook].closes or "", [])
        return order(by_hook[hook], user_edges, opener, opener_edges)

    return ordered


def names(ordered):
    return [one.plugin.name for one in ordered]


def user(first, then):
    return Edge(first, then, "pyproject.toml", by_user=True)


def test_an_edge_is_stronger_than_phase_and_name(plugin, ordered):
    """It says what its author knows; phases and names are what is left."""
    a = plugin("a", batch_start=(hears, {"tryfirst": True, "after": "c"}))
    b, c = plugin("b", batch_start=hears), plugin("c", batch_start=(hears, {"trylast": True}))

    assert names(ordered("batch_start", a, b, c)) == ["b", "c", "a"]


def test_before_and_after_take_names_as_they_are_typed(plugin, ordered):
    """Names are compared folded everywhere."""
    a = plugin("a", batch_start=(hears, {"after": ("Label-Smoothing", "nobody-here")}))
    b = plugin("label_smoothing", batch_start=hears)

    assert names(ordered("batch_start", a, b)) == ["label_smoothing", "a"]


def test_the_users_edge_wins_over_a_plugins(plugin, ordered):
    """The plugin's author can't know what else is installed."""
    a = plugin("a", batch_start=(hears, {"before": "b"}))
    b = plugin("b", batch_start=hears)

    result = ordered("batch_start", a, b, user_edges=[user("b", "a")])

    assert names(result) == ["b", "a"]
    assert result.reason(*result.implementations) == "edge: declared by pyproject.toml"


def test_a_circle_is_an_error_that_names_who_declared_each_edge(plugin, ordered):
    """No order would be right, and whoever mends it must know whom to ask."""
    a = plugin("a", distribution="eventloop-a", batch_start=(hears, {"before": "b"}))
    b = plugin("b", distribution="eventloop-b", batch_start=(hears, {"before": "a"}))

    with pytest.raises(PluginError) as caught:
        ordered("batch_start", a, b)

    assert str(caught.value) == (
        "the order of batch_start has a cycle: a → b → a\n"
        "  edge 1  a before b, declared by a (eventloop-a 0.2.1), batch_start\n"
        "  edge 2  b before a, declared by b (eventloop-b 0.2.1), batch_start\n"
        "  fix     take one edge out, or overrule it in [tool.eventloop.order]"
    )


def test_an_edge_against_the_roles_is_an_error(plugin, ordered):
    """A callback that ran before an algorithm would see what isn't so."""
    watch = plugin("watch", "callback", batch_start=(hears, {"before": "mix"}))

    with pytest.raises(PluginError, match="watch can't run before mix: algorithms run before"):
        ordered("batch_start", watch, plugin("mix", batch_start=hears))


def test_closing_events_run_algorithms_in_reverse(plugin, ordered):
    """First in, last out: what one prepared inside another's must be undone inside it."""
    plugins = [
        plugin(name, role, before_forward=(hears, options), after_forward=hears)
        for name, role, options in [
            ("task", "task", {}),
            ("a", "algorithm", {"trylast": True}),
            ("b", "algorithm", {"after": "c"}),
            ("c", "algorithm", {}),
            ("x", "callback", {}),
            ("y", "callback", {}),
        ]
    ]

    assert names(ordered("before_forward", *plugins)) == ["task", "c", "b", "a", "x", "y"]
    assert names(ordered("after_forward", *plugins)) == ["a", "b", "c", "task", "x", "y"]


def test_the_users_edge_on_the_opening_event_reaches_the_closing_one(plugin, ordered):
    """One order counts for both."""
    a, b = (plugin(name, before_loss=hears, after_loss=hears) for name in "ab")

    edges = [user("b", "a")]

    assert names(ordered("before_loss", a, b, user_edges=edges)) == ["b", "a"]
    assert names(ordered("after_loss", a, b, opener_edges=edges)) == ["a", "b"]


def test_wrappers_of_closing_events_are_not_reversed(plugin, ordered):
    """They enclose, and the first is outermost everywhere."""

    def wraps(state):
        yield

    plugins = [
        plugin(name, before_loss=hears, after_loss=(wraps, {"wrapper": True})) for name in "ab"
    ]

    assert names(ordered("after_loss", *plugins)) == ["a", "b"]


def test_an_edge_on_the_closing_event_is_literal(plugin, ordered):
    """Who says "after" on it means it."""
    a = plugin("a", before_loss=hears, after_loss=hears)
    b = plugin("b", before_loss=hears, after_loss=(hears, {"after": "a"}))

    assert names(ordered("after_loss", a, b)) == ["a", "b"]


def test_the_phase_of_one_that_only_closes_is_its_own(plugin, ordered):
    """It has no opening whose phase could count."""
    a = plugin("a", before_loss=hears, after_loss=hears)
    first = plugin("z", after_loss=(hears, {"tryfirst": True}))
    last = plugin("y", after_loss=(hears, {"trylast": True}))

    assert names(ordered("after_loss", a, first, last)) == ["z", "a", "y"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("hook", ["batch_start", "batch_end", "forward"])
def test_random_sets_have_one_order_however_they_are_discovered(plugin, hook):
    """Two machines with the same packages must train alike: 200 sets, 50 orders each."""
    rng = random.Random(hook)
    for _ in range(200):
        known = [f"p{idx}" for idx in range(rng.randint(2, 7))]
        rank = {name: rng.random() for name in known}  # edges along it never make a circle
        plugins = [_random_plugin(plugin, rng, name, rank, hook) for name in known]
        found = [one for each in plugins for one in implementations(each, HOOKS)[0]]
        here = [one for one in found if one.hook.name == hook]
        opener = [one for one in found if one.hook.name == HOOKS[hook].closes]
        expected = names(order(here, (), opener))

        for _ in range(50):
            rng.shuffle(here)
            rng.shuffle(opener)
            assert names(order(here, (), opener)) == expected


def _random_plugin(plugin, rng, name, rank, hook):
    options = dict(rng.choice(PHASES))
    options["before"] = tuple(one for one in rank if rank[one] > rank[name] and rng.random() < 0.3)
    options["conditional"] = hook == "forward"
    opener = {HOOKS[hook].closes: (hears, dict(rng.choice(PHASES)))} if HOOKS[hook].closes else {}
    return plugin(name, **opener, **{hook: (hears, options)})


def test_every_neighbour_has_a_reason(plugin, ordered):
    """`eventloop plugins order` says why, for each pair."""
    result = ordered(
        "batch_start",
        plugin("task", "task", batch_start=hears),
        plugin("b", batch_start=(hears, {"tryfirst": True})),
        plugin("c", batch_start=hears),
        plugin("d", batch_start=hears),
        plugin("a", batch_start=(hears, {"after": "d"})),
    )
    found = result.implementations

    assert [result.reason(*pair) for pair in itertools.pairwise(found)] == [
        "role: task before algorithm",
        "phase: tryfirst before normal",
        "",
        "edge: declared by a, batch_start",
    ]


def test_close_is_the_reverse_of_everything(plugin, ordered):
    """What was set up first is taken down last, and a logger hears what the others end with."""
    plugins = [
        plugin(name, role, close=hears)
        for name, role in [("task", "task"), ("a", "algorithm"), ("b", "algorithm"),
                           ("x", "callback"), ("y", "callback")]
    ]  # fmt: skip
    result = ordered("close", *plugins)

    assert names(result) == ["y", "x", "b", "a", "task"]
    assert [result.reason(*pair) for pair in itertools.pairwise(result)] == [
        "",
        "role: callback before algorithm",
        "",
        "role: algorithm before task",
    ]


@pytest.mark.parametrize("options", [{"after": "b"}, {"trylast": True}])
def test_edges_and_phases_on_close_are_literal(plugin, ordered, options):
    """Who says "after" on it means it."""
    a, b = plugin("a", close=hears), plugin("b", close=hears)
    delta = plugin("delta", close=(hears, options))

    assert names(ordered("close", a, b, plugin("delta", close=hears))) == ["delta", "b", "a"]
    assert names(ordered("close", a, b, delta)).index("delta") > 0


def test_an_edge_against_the_roles_of_close_is_an_error(plugin, ordered):
    """They run the other way round there."""
    watch = plugin("watch", "callback", close=(hears, {"after": "mix"}))

    with pytest.raises(PluginError, match="mix can't run before watch: callbacks run before"):
        ordered("close", watch, plugin("mix", close=hears))


def test_names_in_messages_are_as_they_are_typed(plugin, ordered):
    """`-p no:label_smoothing` and `Label-Smoothing` are one, but a person knows one of them."""
    a = plugin("Label-Smoothing", batch_start=(hears, {"before": "weight_ema"}))
    b = plugin("weight-ema", batch_start=(hears, {"before": "label_smoothing"}))

    with pytest.raises(PluginError, match="Label-Smoothing → weight-ema → Label-Smoothing"):
        ordered("batch_start", a, b)
