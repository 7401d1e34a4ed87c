"""`eventloop plugins show`."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("no_others")

HEAD = "from eventloop import hookimpl\n"
AA = (
    HEAD
    + '''
class Plugin:
    """Does a thing.

    Args:
        alpha: how much of it.
    """

    def __init__(self, *, alpha: float = 0.4, beta: int = 1): pass

    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield)

    @hookimpl(tryfirst=True)
    def batch_end(self, state): pass
'''
)
BB = (
    HEAD
    + """
class Plugin:
    @hookimpl(after="aa-test")
    def batch_end(self, state): pass

    @hookimpl
    def loss(self, state): return 1
"""
)


@pytest.fixture
def two(install, clean):
    """Two plugins that meet in two hooks."""
    install("aa-test", AA)
    install("bb-test", BB)
    return clean


def as_json(ran):
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_show_tells_a_problem_on_lines_of_its_own(run, install, clean):
    """It is the same message as that of a run, with the file and a line to paste."""
    install("aa-test", "raise ValueError('no')")

    ran = run("plugins", "show", "aa-test")

    assert "\\n" not in ran.out
    assert "\nproblems:\n" in ran.out
    assert "  fix     " in ran.out


def test_show_tells_values_and_where_each_came_from(run, two, monkeypatch):
    """A value that nobody can trace is one that nobody trusts."""
    monkeypatch.setenv("EVENTLOOP_AA_TEST__BETA", "3")

    shown = as_json(run("plugins", "show", "AA_test", "--aa-test.alpha", "0.2", "--json"))

    options = {one["option"]: (one["value"], one["source"], one["doc"]) for one in shown["options"]}
    assert options["--aa-test.alpha"] == ("0.2", "flag", "how much of it.")
    assert options["--aa-test.beta"] == ("3", "EVENTLOOP_AA_TEST__BETA", "")
    assert {one["hook"]: one["how"] for one in shown["hooks"]} == {
        "batch_end": "plain",
        "loss": "wrapper",
    }
    assert shown["edges"] == [
        "aa-test before bb-test, declared by bb-test (eventloop-bb-test 1.0), batch_end"
    ]
    assert shown["import_s"] > 0
    assert shown["imports_torch"] is False


def test_show_as_text_has_the_same(run, two):
    """It is what a person reads."""
    ran = run("plugins", "show", "aa-test")

    for part in ("eventloop-aa-test", "--aa-test.alpha", "batch_end", "wrapper", "import s"):
        assert part in ran.out


DECLARES = """
from eventloop import hookimpl, hookspec

class Hooks:
    @hookspec(per="any", collection=True)
    def aa_terms(self, state):
        \"\"\"Returns a term.

        Called: once a batch.
        \"\"\"

    @hookspec(per="any", firstresult=True)
    def aa_weight(self, state):
        "Returns the weight of all terms."

class Plugin:
    hookspecs = Hooks
"""
TERMS = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def aa_terms(self, state): ...
"""


@pytest.fixture
def extended(install, clean):
    """A plugin that declares hooks, and one that implements one of them."""
    install("aa-test", DECLARES)
    install("bb-test", TERMS)
    return clean


def test_show_and_order_know_the_hooks_of_plugins(run, extended, only):
    """From both sides, and an action that no plugin answers."""
    declaring = as_json(run("plugins", "show", "aa-test", "--json", *only))["declares"]
    (row,) = as_json(run("plugins", "show", "bb-test", "--json", *only))["hooks"]

    assert [(one["hook"], one["implemented by"]) for one in declaring] == [
        ("aa_terms", ["bb-test"]),
        ("aa_weight", []),
    ]
    assert (row["hook"], row["kind"], row["declared by"]) == ("aa_terms", "collection", "aa-test")
    assert "aa_terms  bb-test" in run("plugins", "order", "aa_terms", *only).out
    out = run("plugins", "order", "aa_weight", *only).out
    assert "(none: a call without an answer is an error)" in out
