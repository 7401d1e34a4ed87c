"""What subcommands of `eventloop plugins` read: plugins that print, remarks, a wrong choice."""

from __future__ import annotations

import json
import re

import pytest

from eventloop.cli import main

pytestmark = pytest.mark.usefixtures("no_others")

HEAD = "from eventloop import hookimpl\n"
HOOK = "@hookimpl\n    def close(self): pass"


@pytest.fixture
def two(install, clean):
    """Two plugins without a defect."""
    install("aa-test")
    install("bb-test")
    return clean


LOUD = "import os, sys\nprint('hello')\nsys.stdout.write('there')\nos.write(1, b'you')\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("argv", [["check"], ["order"], ["show", "aa-test"], ["lock"]])
def test_json_is_json_whatever_a_plugin_prints(install, clean, only, capfd, argv):
    """A program reads it; what plugins say while they are imported goes to stderr."""
    install("aa-test", f"{LOUD}{HEAD}class Plugin:\n    {HOOK}\n")
    install("bb-test")

    main(["plugins", *argv, "--json", *only])
    written = capfd.readouterr()

    json.loads(written.out)
    assert "hello" in written.err
    assert "you" in written.err


def test_check_shows_its_table_although_the_choice_names_what_is_not_there(run, two, only):
    """All that is wrong is told at once."""
    (two / "pyproject.toml").write_text(
        '[tool.eventloop]\ndisable = ["nosuch"]\nrequired = ["nobody"]\nowners = {losss = "aa"}\n'
    )

    ran = run("plugins", "check", "-p", "zz-test", "-p", "./no.py:X", *only)

    assert ran.status == 1
    assert len(re.findall(r"^aa-test +active", ran.out, re.MULTILINE)) == 1
    for part in ("'zz-test'", "./no.py:X", "'nosuch'", "nobody is required", "'losss'", "5 prob"):
        assert part in ran.out


def test_an_edge_to_what_is_not_installed_is_a_remark(run, install, clean, only):
    """It is not a mistake, but whoever wonders about the order should see it."""
    install(
        "aa-test",
        f"{HEAD}class Plugin:\n    @hookimpl(after='zzyzx')\n    def batch_end(self, state): 0\n",
    )
    install("bb-test")

    checked, ordered = run("plugins", "check", *only), run("plugins", "order", *only)

    said = "remark: aa-test (eventloop-aa-test 1.0), batch_end: an edge to zzyzx"
    assert (checked.status, ordered.status) == (0, 0)
    assert said in checked.out
    assert said in ordered.out


DECLARES = """
from eventloop import hookimpl, hookspec

class Hooks:
    @hookspec(per="any", warn_on_impl=DeprecationWarning("aa_moved goes in 0.4"))
    def aa_moved(self, state): ...

class Plugin:
    hookspecs = Hooks
"""


@pytest.mark.nightly
def test_deprecations_are_remarks_of_check_and_order(run, install, clean, only):
    """Python hides a DeprecationWarning from people who run a command."""
    install("aa-test", DECLARES)
    install("bb-test", f"{HEAD}class Plugin:\n    @hookimpl\n    def aa_moved(self, state): 0\n")

    checked, ordered = run("plugins", "check", *only), run("plugins", "order", *only)

    said = "remark: bb-test (eventloop-bb-test 1.0), aa_moved: aa_moved goes in 0.4"
    assert said in checked.out
    assert said in ordered.out
