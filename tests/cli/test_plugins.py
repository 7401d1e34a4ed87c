"""`eventloop plugins`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = "1 / 0\nclass Plugin: pass"  # what only importing shows


def test_every_plugin_is_a_row(run, install):
    """Name, role, version, distribution, status and reason are what a person wants to know."""
    install("aa-test", BROKEN, version="0.3")
    install("bb-test", BROKEN, group="eventloop.callbacks")

    ran = run("plugins", "-p", "no:bb-test")
    rows = [line.split() for line in ran.out.splitlines()]

    assert rows[0] == ["name", "role", "version", "distribution", "status", "reason", "marks"]
    assert ["aa-test", "algorithm", "0.3", "eventloop-aa-test", "active"] in rows
    assert ["bb-test", "callback", "1.0", "eventloop-bb-test", "off", "-p", "no:bb-test"] in rows


def test_json_has_the_same_rows(run, install):
    """Scripts read it."""
    install("aa-test", BROKEN)

    rows = {row["name"]: row for row in json.loads(run("plugins", "--json", "--no-plugins").out)}

    assert rows["aa-test"] == {
        "name": "aa-test",
        "role": "algorithm",
        "version": "1.0",
        "distribution": "eventloop-aa-test",
        "status": "off",
        "reason": "--no-plugins",
        "marks": [],
    }


def test_what_nobody_asked_for_is_marked(run, install):
    """It trains along, although it came in with something else."""
    install("aa-test", requested=False)

    ran = run("plugins")
    (row,) = [line for line in ran.out.splitlines() if line.startswith("aa-test")]

    assert row.endswith("dependency")


def test_a_requirement_that_nothing_meets_is_a_row(run, install, clean):
    """The list shows what `fit` would refuse."""
    install("aa-test")
    (clean / "pyproject.toml").write_text('[tool.eventloop]\nrequired = ["nosuch", "aa-test>2"]\n')

    ran = run("plugins", "--json")
    rows = {row["name"]: row for row in json.loads(ran.out)}

    assert ran.status == 0
    assert rows["nosuch"]["reason"].startswith("nosuch is required, but no plugin has this name")
    assert rows["aa-test"]["reason"] == "aa-test>2 is required, but 1.0 is there"


def test_the_list_never_fails_because_of_a_plugin(run, install):
    """It is where one looks when something is wrong."""
    install("task")
    install("twin-test", distribution="one")
    install("twin-test", distribution="two")

    ran = run("plugins", "--json")
    status = {row["name"]: row["status"] for row in json.loads(ran.out)}

    assert ran.status == 0
    assert status["task"] == status["twin-test"] == "problem"


@pytest.mark.parametrize("argv", [["-p", "mixpu-tset"], ["--bogus", "1"], ["tiny.py"]])
def test_wrong_usage_is_refused(run, clean, argv):
    """A name that matches nothing, an option that isn't one, a TASK."""
    assert run("plugins", *argv).status == 2


def test_the_choice_is_read_from_the_project(run, install, clean):
    """The list must say what `fit` would do."""
    install("aa-test")
    (clean / "pyproject.toml").write_text("[tool.eventloop]\nautoload = false\n")

    assert "autoload=false, pyproject.toml" in run("plugins").out


@pytest.mark.parametrize("subcommand", ["list", "hooks"])
def test_neither_torch_nor_a_plugin_nor_a_parser_is_imported(install, tmp_path, subcommand):
    """Each costs more than the answer may take."""
    install("aa-test", BROKEN)
    code = (
        f"import sys; from eventloop.cli import main; status = main(['plugins', {subcommand!r}]); "
        "heavy = {'torch', 'jsonargparse', 'yaml', 'numpy', 'rich', 'eventloop_aa_test_module'}; "
        "sys.exit(status or ' '.join(heavy & set(sys.modules)) or None)"
    )
    source = str(Path(sys.modules["eventloop"].__file__).parents[1])
    paths = os.pathsep.join([str(tmp_path / "site"), source])

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert ("aa-test" if subcommand == "list" else "before_forward") in done.stdout


def test_a_module_is_a_row(run, install):
    """An entry point may name one."""
    install("aa-test", "from eventloop import hookimpl\n", target="")

    rows = {row["name"]: row for row in json.loads(run("plugins", "--json").out)}

    assert rows["aa-test"]["status"] == "active"


@pytest.mark.parametrize("parameters", ["*, teacher: str, x: int = 1", "teacher"])
def test_a_dormant_plugin_is_off_in_the_list(run, install, parameters):
    """As far as its file tells; nothing is imported."""
    install("aa-test", f"1 / 0\nclass Plugin:\n    def __init__(self, {parameters}): pass\n")

    def seen(*argv):
        rows = json.loads(run("plugins", "--json", *argv).out)
        return next((row["status"], row["reason"]) for row in rows if row["name"] == "aa-test")

    assert seen() == ("off", "waiting for --aa-test.teacher")
    assert seen("-p", "aa-test") == ("problem", "needs --aa-test.teacher")


def test_the_list_shows_a_shadowed_distribution(run, install, tmp_path):
    """Which of two versions trains depends on a path."""
    install("aa-test")
    stale = tmp_path / "stale" / "eventloop_aa_test-0.9.dist-info"
    stale.mkdir(parents=True)
    (stale / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: eventloop-aa-test\nVersion: 0.9\n"
    )
    sys.path.append(str(stale.parent))

    rows = {row["name"]: row for row in json.loads(run("plugins", "--json").out)}

    assert "is installed in 2 versions" in rows["aa-test"]["reason"]
