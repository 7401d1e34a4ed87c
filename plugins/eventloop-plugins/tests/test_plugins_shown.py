"""`eventloop plugins show`, `order` and `hooks`."""

from __future__ import annotations

import json

import pytest

from eventloop.actions import ACTIONS
from eventloop.events import EVENTS_AND_QUESTIONS

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


def test_order_gives_the_reason_for_each_pair(run, two, only):
    """Role, edge declared by whom, phase, name."""
    plans = {plan["hook"]: plan for plan in as_json(run("plugins", "order", "--json", *only))}

    calls = plans["batch_end"]["calls"]
    assert [one["plugin"] for one in calls] == ["aa-test", "bb-test"]
    assert calls[1]["reason"].startswith("edge: declared by bb-test (eventloop-bb-test 1.0)")
    assert [(one["depth"], one["how"]) for one in plans["loss"]["calls"]] == [
        (0, "wrapper"),
        (1, "owner"),
    ]
    assert plans["loss"]["owner"] == "bb-test"


def test_order_of_one_hook_is_drawn_as_nesting(run, two, only):
    """What a wrapper encloses stands inside it."""
    lines = run("plugins", "order", "loss", *only).out.splitlines()

    assert lines[1].split()[:4] == ["loss", "aa-test", "algorithm", "wrapper"]
    assert lines[2].startswith("        bb-test") or "  bb-test" in lines[2]
    assert "no plugin implements fit_end" in run("plugins", "order", "fit_end", *only).out


def test_order_names_the_task_where_it_is_chosen(run, two, only):
    """`owners` may prefer the task to a plugin."""
    (two / "pyproject.toml").write_text('[tool.eventloop.owners]\nloss = "task"\n')

    (plan,) = as_json(run("plugins", "order", "loss", "--json", *only))

    assert plan["owner"] == "task"


def test_the_users_order_is_shown_with_where_it_stands(run, two, only):
    """It wins over a plugin's."""
    (two / "pyproject.toml").write_text(
        '[tool.eventloop.order]\nbatch_end = ["bb-test", "aa-test"]\n'
    )

    (plan,) = as_json(run("plugins", "order", "batch_end", "--json", *only))

    assert [one["plugin"] for one in plan["calls"]] == ["bb-test", "aa-test"]
    assert "order.batch_end in pyproject.toml" in plan["calls"][1]["reason"]


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


def test_hooks_of_plugins_are_listed_with_owner_and_implementers(run, extended, only):
    """Who may extend what is a question that the command answers, not the source."""
    rows = {one["name"]: one for one in as_json(run("plugins", "hooks", "--json", *only))}

    terms, weight, of_core = rows["aa_terms"], rows["aa_weight"], rows["batch_end"]
    assert (terms["kind"], terms["declared_by"]) == ("collection", "aa-test")
    assert (terms["implemented_by"], weight["implemented_by"]) == (["bb-test"], [])
    assert (weight["kind"], of_core["declared_by"]) == ("action", "core")


def test_the_contract_of_a_plugins_hook_says_whose_it_is(run, extended, only):
    """It is read where it isn't in the reference."""
    assert run("plugins", "hooks", "aa_terms", *only).out == (
        "def aa_terms(self, state)\n"
        "    collection, at any time\n"
        "    declared by aa-test\n"
        "    implemented by bb-test\n"
        "\n"
        "Returns a term.\n\nCalled: once a batch.\n"
    )


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


def test_list_does_not_take_a_plugins_hook_for_a_slip(run, install, clean, only):
    """It is like one of the core's, and another package declares it."""
    install("aa-test", DECLARES.replace("aa_terms", "losses"))
    install("bb-test", TERMS.replace("aa_terms", "losses"))

    rows = {one["name"]: one["status"] for one in as_json(run("plugins", "--json", *only))}
    alone = {
        one["name"]: one for one in as_json(run("plugins", "--json", *only[2:], "--no-plugins"))
    }

    assert (rows["aa-test"], rows["bb-test"]) == ("active", "active")
    assert alone["aa-test"]["status"] == "off"


@pytest.mark.parametrize("command", ["list", "show", "order", "hooks", "check", "lock"])
def test_a_misspelt_switch_is_named(run, clean, command):
    """It looked like an option that lacks its value, or was passed over with a word behind it."""
    alone, with_word = run("plugins", command, "--jsn"), run("plugins", command, "--jsn", "a", "b")

    assert "'--json'" in alone.err
    assert (alone.status, with_word.status) == (2, 2)


def test_hooks_lists_every_hook(run, clean):
    """The catalogue is made from the declarations, so that a new hook is in it."""
    listed = [one["name"] for one in as_json(run("plugins", "hooks", "--json"))]

    assert listed == [*EVENTS_AND_QUESTIONS, *ACTIONS]
    assert len(run("plugins", "hooks").out.splitlines()) == 1 + len(listed)


def test_hooks_writes_the_contract_of_one(run, clean):
    """That is what an author wants to know exactly."""
    out = run("plugins", "hooks", "after_backward").out

    assert EVENTS_AND_QUESTIONS["after_backward"].doc in out
    assert "closes before_backward" in out
    assert run("plugins", "hooks", "after_bakward").err.count("'after_backward'") == 1
    assert "event, at any time" in run("plugins", "hooks", "exception").out


@pytest.mark.parametrize("name", ["show", "order", "hooks", "check", "new"])
def test_every_subcommand_has_help(run, clean, name):
    """It starts with how the subcommand is written."""
    ran = run("plugins", name, "--help")

    assert ran.status == 0
    assert ran.out.startswith(f"usage: eventloop plugins {name}")


def test_the_order_of_wrappers_alone_is_shown(run, install):
    """Nobody owns the action without a task, but what encloses it can be seen."""
    code = (
        "from eventloop import hookimpl\n"
        "class Plugin:\n"
        "    @hookimpl(wrapper=True)\n"
        "    def loss(self, state):\n"
        "        return (yield)\n"
    )
    install("aa-test", code)

    shown = run("plugins", "order", "loss", "--no-plugins", "-p", "aa-test")

    assert shown.status == 0, shown.err
    assert "aa-test" in shown.out
