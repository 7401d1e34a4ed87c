"""`eventloop plugins new`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import eventloop

pytestmark = pytest.mark.usefixtures("no_others")

SOURCE = str(Path(eventloop.__file__).parents[1])
HEADINGS = ["What it does", "Install", "Use", "Hooks", "Options", "Cost", "Evidence", "Source"]


def python(*argv: str, path: list[str], cwd: Path) -> str:
    """Runs Python on `path` and what is installed; gives what it writes."""
    done = subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("role", ["algorithm", "callback"])
def test_a_new_plugin_installs_is_listed_and_passes_its_test(run, clean, tmp_path, role):
    """Who starts a plugin starts from something that works."""
    assert run("plugins", "new", "demo-test", "--role", role).status == 0
    site, folder = tmp_path / "installed", "eventloop-demo-test"
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]

    python("-m", "pip", "install", *flags, f"./{folder}", path=[], cwd=clean)
    listed = python("-m", "eventloop", "plugins", "--json", path=[str(site), SOURCE], cwd=clean)
    tested = python("-m", "pytest", "-q", folder, path=[str(site), SOURCE], cwd=clean)

    (row,) = [row for row in json.loads(listed) if row["name"] == "demo-test"]
    assert (row["role"], row["status"], row["version"]) == (role, "active", "0.1.0")
    assert "passed" in tested


def test_the_lines_that_are_printed_install_what_they_run(run, clean):
    """pytest, too, which a fresh environment hasn't got: it is an extra of the package."""
    printed = run("plugins", "new", "demo-test").out

    install, test = re.findall(r"`(python -m [^`]+)`", printed)
    (target,) = shlex.split(install)[5:]
    folder, extra = re.fullmatch(r"(.+)\[(\w+)\]", target).groups()
    project = tomllib.loads((clean / folder / "pyproject.toml").read_text())["project"]
    assert shlex.split(install)[:5] == ["python", "-m", "pip", "install", "-e"]
    assert any(one.startswith("pytest") for one in project["optional-dependencies"][extra])
    assert "eventloop-testing>=0.1,<0.2" in project["optional-dependencies"][extra]
    assert test == f"python -m pytest {Path(folder).name}"


@pytest.mark.parametrize("role", ["algorithm", "callback"])
def test_a_new_plugin_has_no_lint(run, clean, role):
    """As generated, in the format of the project."""
    run("plugins", "new", "demo-test", "--role", role)

    for command in (["check"], ["format", "--check"]):
        python("-m", "ruff", *command, "eventloop-demo-test", path=[], cwd=clean)


@pytest.mark.nightly
def test_a_new_plugin_type_checks(run, clean, run_mypy):
    """Under mypy strict, its tests too; both roles at once, for mypy reads torch first."""
    for role in ("algorithm", "callback"):
        run("plugins", "new", f"demo-{role}", "--role", role)
    folders = [f"eventloop-demo-{role}/{part}" for role in ("algorithm", "callback")
               for part in ("src", "tests")]  # fmt: skip

    ran = run_mypy(*folders, cwd=clean)

    assert ran.returncode == 0, ran.stdout


def test_the_readme_has_the_headings_of_every_plugin(run, clean):
    """Folder, distribution and name agree, and so do the READMEs."""
    run("plugins", "new", "demo-test")

    readme = (clean / "eventloop-demo-test" / "README.md").read_text()

    assert [line[3:] for line in readme.splitlines() if line.startswith("## ")] == HEADINGS
    assert "@" not in readme


@pytest.mark.parametrize("name", ["Label_Sharpening", "eventloop-label-sharpening"])
def test_the_name_is_brought_into_form(run, clean, name):
    """By convention `x`, `eventloop-x`, `eventloop_x`."""
    run("plugins", "new", name)

    folder = clean / "eventloop-label-sharpening"
    assert (folder / "src" / "eventloop_label_sharpening" / "plugin.py").is_file()
    assert (
        "class LabelSharpening:"
        in (folder / "src" / "eventloop_label_sharpening" / "plugin.py").read_text()
    )


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "needs a NAME"),
        (["task"], "can't be named 'task'"),
        (["a b"], "can't be named"),
        (["../x"], "can't be named"),
        (["1x"], "can't be named"),
        (["seed"], "a setting has this name"),
        (["json"], "has this name"),
        (["no-plugins"], "an option of the command has this name"),
        (["class"], "Python has this name"),
        (["none"], "Python has this name"),
        (["torch"], "`eventloop plugins new my-torch`"),
        (["eventloop"], "torch or eventloop has this name"),
        (["state"], "torch or eventloop has this name"),
        (["fit"], "a command has this name"),
        (["sam"], "the package eventloop-sam uses this name"),
        (["demo", "--role", "algoritm"], "the closest is 'algorithm'"),
    ],
)
def test_what_can_not_be_a_plugin_is_refused(run, clean, argv, part):
    """Before anything is written."""
    ran = run("plugins", "new", *argv)

    assert ran.status == 2
    assert part in ran.err
    assert [path.name for path in clean.iterdir()] == ["pyproject.toml"]


def test_what_is_installed_keeps_its_name(run, install, clean):
    """Two plugins of one name stop every run."""
    install("taken-test")

    assert (
        "taken-test (eventloop-taken-test 1.0) has this name"
        in run("plugins", "new", "taken-test").err
    )


def test_its_help_lists_only_what_has_an_effect(run, clean):
    """No plugin takes part in writing one, so there is none to choose."""
    ran = run("plugins", "new", "--help")

    assert "--role" in ran.out
    assert not [word for word in ("-p NAME", "--no-plugins", "--config") if word in ran.out]
    assert run("plugins", "new", "demo", "-p", "no:mixup").status == 2


def test_nothing_is_overwritten(run, clean):
    """Somebody's work may stand there."""
    (clean / "eventloop-demo").mkdir()

    assert run("plugins", "new", "demo").status == 2
