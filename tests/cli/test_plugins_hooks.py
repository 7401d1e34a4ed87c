"""`eventloop plugins hooks`."""

from __future__ import annotations

import json

import pytest

from eventloop.actions import ACTIONS
from eventloop.events import EVENTS_AND_QUESTIONS

pytestmark = pytest.mark.usefixtures("no_others")


def as_json(ran):
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


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


def test_list_does_not_take_a_plugins_hook_for_a_slip(run, install, clean, sources_of_hooks, only):
    """It is like one of the core's, and another package declares it."""
    for name, source in sources_of_hooks.items():
        install(name, source.replace("aa_terms", "losses"))

    rows = {one["name"]: one["status"] for one in as_json(run("plugins", "--json", *only))}
    alone = {
        one["name"]: one for one in as_json(run("plugins", "--json", *only[2:], "--no-plugins"))
    }

    assert (rows["aa-test"], rows["bb-test"]) == ("active", "active")
    assert alone["aa-test"]["status"] == "off"


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
