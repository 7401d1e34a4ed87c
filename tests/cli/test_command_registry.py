"""Commands that packages add, with the entry-point group `eventloop.commands`."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import importlib_metadata
import pytest

from eventloop import vocabulary
from eventloop.cli import command_registry

PLUGINS = Path(__file__).parents[2] / "plugins"
RUN = "def run(argv):\n    print(argv)\n    return 3\n"


@pytest.fixture
def add(install):
    """Installs a package that adds a command."""
    return partial(install, code=RUN, group="eventloop.commands", target=":run")


def test_a_command_gets_what_follows_its_name_and_returns_the_exit_status(run, add):
    """It reads its own command line."""
    add("hi-test")

    assert run("hi_test", "a", "--b") == (3, "['a', '--b']\n", "")


def test_help_and_list_describe_a_command_without_importing_it(run, add):
    """A broken package must not break what a person needs to find it."""
    add("hi-test", code="raise RuntimeError", summary="Says hi.")

    line = next(one for one in run("--help").out.splitlines() if "hi-test" in one)
    rows = json.loads(run("plugins", "--json").out)

    assert line.split() == ["hi-test", "Says", "hi.", "(eventloop-hi-test)"]
    assert [row["role"] for row in rows if row["name"] == "hi-test"] == ["command"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_help_describes_each_command_of_a_package_of_several(is_installed, run, add, monkeypatch):
    """The summary of the package, which they share, says of none what it does."""
    distribution = "eventloop-experiments"
    if is_installed:
        add("sweep", distribution=distribution, summary="Trains several times.")
    else:
        monkeypatch.setattr("importlib_metadata.distributions", lambda **_: iter(()))

    lines = [line for line in run("--help").out.splitlines() if f"({distribution}" in line]

    assert len(lines) >= 3
    assert all("Trains several times." not in line for line in lines)
    assert len({line.split(maxsplit=1)[1] for line in lines}) == len(lines)
    if not is_installed:
        assert all(line.endswith("which isn't installed)") for line in lines)


def test_a_command_of_another_package_is_described_by_its_own_summary(run, add, monkeypatch):
    """Its name is that of a known command, and what it does is its author's to say."""
    every = importlib_metadata.distributions
    monkeypatch.setattr(
        "importlib_metadata.distributions",
        lambda **given: [one for one in every(**given) if one.name != "eventloop-experiments"],
    )
    add("sweep", distribution="my-sweep", summary="Sweeps the floor.")

    (line,) = [line for line in run("--help").out.splitlines() if line.startswith("  sweep ")]

    assert line.split(maxsplit=1)[1] == "Sweeps the floor. (my-sweep)"


def test_list_sees_that_a_command_lacks_a_module(run, add):
    """It takes the same glance at its files as at those of a plugin."""
    add("hi-test", code="import nosuch\n" + RUN)

    (row,) = [one for one in json.loads(run("plugins", "--json").out) if one["name"] == "hi-test"]

    assert (row["status"], row["distribution"]) == ("problem", "eventloop-hi-test")
    assert "no module named 'nosuch'" in row["reason"]


def test_a_command_that_cannot_be_imported_is_an_error_without_a_traceback(run, add):
    """A dependency that is gone is the usual reason, and the same line of pip brings it."""
    add("hi-test", code="import nosuch\n" + RUN)

    ran = run("hi-test")

    assert ran.status == 1
    assert ran.err == (
        "PluginError: command 'hi-test' can't be imported: ModuleNotFoundError: No module named "
        "'nosuch'\n"
        "  plugin       hi-test (eventloop-hi-test 1.0)\n"
        "  entry_point  eventloop.commands: eventloop_hi_test_module:run\n"
        "  fix          install it with all that it needs, `pip install eventloop-hi-test`, or "
        "remove it with `pip uninstall eventloop-hi-test`\n"
    )


def test_two_packages_with_one_command_are_an_error_that_names_both(run, add):
    """Which of them runs must not depend on the file system."""
    add("hi-test", distribution="one-hi")
    add("hi_test", distribution="two-hi", version="2.0")

    ran = run("hi-test")

    assert (ran.status, ran.out) == (1, "")
    assert "2 packages add the command 'hi-test': one-hi 1.0 and two-hi 2.0" in ran.err
    assert "`pip uninstall one-hi` or `pip uninstall two-hi`" in ran.err


def test_the_core_s_command_wins_and_check_names_both_distributions(run, add):
    """No package that comes with something else changes what `eventloop export` does."""
    add("export", distribution="my-export")

    assert "usage: eventloop export" in run("export", "--help").out
    checked = run("plugins", "check", "--no-plugins")
    assert checked.status == 1
    assert "'export' of my-export 1.0 isn't reached: torch-eventloop has a command" in checked.out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("run = 3", "command 'hi-test' can't be called: its entry point names 3"),
        ("def run(argv): pass", "command 'hi-test' returned None, which is not an exit status"),
        ("def run(argv): return {}['x']", "KeyError: 'x'; raised by command hi-test (eventloop-"),
    ],
)
def test_a_command_that_breaks_the_contract_is_blamed(run, add, code, message):
    """Exit status 0 would hide it."""
    add("hi-test", code=code)

    ran = run("hi-test")

    assert ran.status == 1
    assert message in ran.err.splitlines()[0]


@pytest.mark.parametrize(("argv", "status"), [(["--help"], 0), (["--nope"], 2), (["4"], 4)])
def test_a_command_may_exit_as_argparse_does(run, add, argv, status):
    """Not everyone wants another reader of command lines."""
    add(
        "hi-test",
        code="import argparse, sys\ndef run(argv):\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('n', type=int)\n    sys.exit(parser.parse_args(argv).n)\n",
    )

    ran = run("hi-test", *argv)

    assert ran.status == status
    assert "SystemExit" not in ran.err


def test_a_command_without_a_distribution_is_refused(run, add, tmp_path):
    """An installation that was interrupted leaves entry points without a name."""
    add("hi-test")
    next((tmp_path / "site").glob("*.dist-info/METADATA")).unlink()

    ran = run("hi-test")

    assert ran.status == 1
    assert "'hi-test' comes from a distribution without a name and version" in ran.err


@pytest.mark.parametrize("name", ["hi.test", "hi--test"])
def test_a_name_that_cannot_be_typed_is_a_problem(run, add, name):
    """Names follow the rule of those of plugins."""
    add(name, distribution="eventloop-hi")

    assert f"a command can't be named {name!r}" in run(name).err


def test_every_command_of_the_repository_says_where_it_is(run):
    """The pages name it like those of the core, and a clone is where a package is until there is a release."""
    projects = [
        tomllib.loads(one.read_text())["project"] for one in PLUGINS.glob("*/pyproject.toml")
    ]
    groups = [(one["name"], one.get("entry-points", {})) for one in projects]
    commands = {
        name: package for package, group in groups for name in group.get("eventloop.commands", {})
    }

    assert len(commands) >= 3
    for name in commands.keys() - entry_points(group="eventloop.commands").names:
        said, package = run(name).err, commands[name]
        assert f"a command of {package}, which isn't installed" in said
        assert f"from a clone `pip install ./plugins/{package}`" in said


def test_an_unknown_command_is_compared_with_those_of_packages(run, add):
    """A typo in the name of an added one is as likely."""
    add("hi-test")

    ran = run("hi-tets")

    assert ran.status == 2
    assert "there is no command 'hi-tets'; the closest is 'hi-test'" in ran.err


@pytest.mark.parametrize(("word", "here"), vocabulary.COMMAND_WORDS.items())
def test_a_command_of_another_trainer_is_named(word, here, run, clean):
    """Whoever comes from another trainer types `train` first."""
    for typed in (word, word.capitalize()):
        ran = run(typed, "task.py")

        assert ran.status == 2
        expected = f"there is no command {typed!r}; here it is `eventloop {here}`\n"
        assert ran.err.startswith(f"UsageError: {expected}")
    assert here.split()[0] in {*command_registry.COMMANDS, *command_registry.COMMANDS_OF_PACKAGES}


@pytest.mark.parametrize("name", ["show", "plugins-show", "verify"])
def test_a_subcommand_is_no_command_by_itself(name, run, clean):
    """It belongs to its group: `eventloop plugins show`."""
    ran = run(name)

    assert ran.status == 2
    assert f"there is no command {name!r}" in ran.err


def test_a_command_takes_no_part_in_runs(run, add, tiny):
    """Neither the order nor the lock knows it; `-p` is about what takes part."""
    add("hi-test")

    assert run("plugins", "lock").status == 0
    assert run("fit", "tiny.py").status == 0
    assert "hi-test" not in (tiny / "eventloop.lock").read_text()
    assert "hi-test" not in run("plugins", "order").out
    assert "no plugin is named 'hi-test'" in run("fit", "tiny.py", "-p", "hi-test").err


def test_show_has_origin_and_import_time_of_a_command(run, add):
    """Hooks and options it has none."""
    add("hi-test", version="1.2")

    shown = json.loads(run("plugins", "show", "hi-test", "--json").out)

    assert (shown["role"], shown["status"], shown["version"]) == ("command", "available", "1.2")
    assert shown["imports_torch"] is False
    assert shown["hooks"] == shown["options"] == []


def test_check_imports_commands_too(run, add):
    """It finds what only the import shows."""
    add("hi-test", code="1 / 0")
    add("yo-test")

    ran = run("plugins", "check", "--no-plugins", "--json")

    rows = {row["name"]: row for row in json.loads(ran.out)["plugins"]}
    assert (rows["hi-test"]["status"], rows["yo-test"]["status"]) == ("problem", "available")
    assert ran.status == 1
    assert len(json.loads(ran.out)["problems"]) == 1
