"""`eventloop plugins show`."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("no_others")


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
