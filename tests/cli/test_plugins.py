"""`eventloop plugins`: what its subcommands share."""

from __future__ import annotations

import pytest

from eventloop.cli.plugins import GROUP


@pytest.mark.parametrize("name", ["shwo", "tiny.py"])
def test_an_unknown_subcommand_is_refused(run, clean, name):
    """With the closest."""
    ran = run("plugins", name)

    assert ran.status == 2
    assert f"no subcommand {name!r}" in ran.err


@pytest.mark.parametrize("name", GROUP.subcommands)
def test_every_subcommand_has_help(run, clean, name):
    """It starts with how the subcommand is written."""
    ran = run("plugins", name, "--help")

    assert ran.status == 0
    assert ran.out.startswith(f"usage: eventloop plugins {name}")


def test_the_help_of_all_lists_the_subcommands(run, clean):
    """A person who knows none of them types this."""
    ran = run("plugins", "--help")

    assert ran.out.startswith("usage: eventloop plugins [SUBCOMMAND]")
    assert "  lock     write eventloop.lock" in ran.out


@pytest.mark.parametrize("command", ["list", "show", "order", "hooks", "check", "lock"])
def test_a_misspelt_switch_is_named(run, clean, command):
    """It looked like an option that lacks its value, or was passed over with a word behind it."""
    alone = run("plugins", command, "--jsn")
    with_word = run("plugins", command, "--jsn", "a", "b")

    assert "'--json'" in alone.err
    assert (alone.status, with_word.status) == (2, 2)
