"""The order that a project and a site give to plugins."""

from __future__ import annotations

from eventloop.config.configuration import Configuration
from eventloop.plugin.configured_order import edges_of, order_problems
from eventloop.plugin.records import Plugin
from eventloop.plugin.registry import Registry

INSTALLED = (Plugin("ema", "algorithm", stage="off"), Plugin("mixup", "algorithm", stage="off"))


def edges(configuration: Configuration, hook: str) -> list[tuple[str, str]]:
    return [(edge.first, edge.then) for edge in edges_of(configuration.rules, hook)]


def test_order_holds_for_its_hook_or_for_every_hook(read_configuration):
    """Each name runs before all that follow it."""
    rules = 'order = {before_forward = ["C", "b", "a"], all = ["x", "y"]}'
    configuration = read_configuration(rules)

    assert edges(configuration, "before_forward") == [
        ("c", "b"),
        ("c", "a"),
        ("b", "a"),
        ("x", "y"),
    ]
    assert edges(configuration, "batch_end") == []  # its order comes from batch_start's
    (edge,) = edges_of(configuration.rules, "batch_start")
    assert edge.by_user
    assert edge.declared_by == "order.all in pyproject.toml"


def test_the_closer_wish_for_an_order_wins(read_configuration):
    """A hook's entry over that for all hooks, the site's over the project's."""
    project = 'order = {before_forward = ["b", "a"], all = ["a", "b", "c"]}'
    configuration = read_configuration(project, site='order = {all = ["c", "b"]}')

    assert edges(configuration, "before_forward") == [("c", "b"), ("b", "a")]
    assert ("b", "c") not in edges(configuration, "batch_end")


def test_an_order_of_what_does_not_exist_is_a_problem(read_configuration):
    """A misspelt hook or plugin would leave the order as it was."""
    rules = read_configuration('order = {before_foward = ["ema"], all = ["ema", "mixpu"]}').rules

    first, second = order_problems(Registry(INSTALLED, rules=rules))

    assert "no hook has this name; the closest is 'before_forward'" in str(first)
    assert "order.all names 'mixpu'" in str(second)
    assert "the closest is 'mixup'" in str(second)


def test_a_sites_order_may_name_what_is_not_installed(read_configuration):
    """Its file is for many environments; a hook that doesn't exist is a mistake in any."""
    site = 'order = {before_foward = ["ema"], all = ["ema", "mixpu"]}'
    rules = read_configuration(site=site).rules

    (problem,) = order_problems(Registry(INSTALLED, rules=rules))

    assert "order names 'before_foward', but no hook has this name" in str(problem)


def test_an_order_for_every_hook_is_reversed_on_close_and_one_for_close_is_literal(
    read_configuration,
):
    """`close` takes down in reverse; who names it means what stands there."""
    every = read_configuration('order = {all = ["ema", "mixup"]}').rules
    literal = read_configuration('order = {close = ["ema", "mixup"]}').rules

    assert [(edge.first, edge.then) for edge in edges_of(every, "close")] == [("mixup", "ema")]
    assert [(edge.first, edge.then) for edge in edges_of(every, "batch_start")] == [
        ("ema", "mixup")
    ]
    assert [(edge.first, edge.then) for edge in edges_of(literal, "close")] == [("ema", "mixup")]
