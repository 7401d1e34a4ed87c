"""The package: its names, and what importing it costs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import eventloop


@pytest.mark.parametrize("name", eventloop.__all__)
def test_every_public_name_is_there(name):
    """Those that need torch come when they are asked for."""
    assert getattr(eventloop, name).__name__.removeprefix("eventloop.") == name
    assert name in dir(eventloop)


def test_an_unknown_name_is_an_attribute_error():
    """`hasattr` and typing tools rely on it."""
    with pytest.raises(AttributeError, match="Trainr"):
        _ = eventloop.Trainr


def test_the_version_is_that_of_the_distribution():
    """Two places, one version."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()

    assert eventloop.__version__ == tomllib.loads(text)["project"]["version"]


def imported(run_python, statement: str) -> set[str]:
    """Returns the top-level packages that a statement imports, as Python tells of them."""
    ran = run_python(statement, "-X", "importtime")
    assert ran.returncode == 0, ran.stderr
    modules = [line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()]
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("statement", ["import eventloop", "from eventloop import hookimpl, Time",
                                       "from eventloop.events import EVENTS",
                                       "from eventloop.plugin.discover import discover",
                                       "import eventloop.cli"])  # fmt: skip
def test_importing_does_not_import_torch(statement, run_python):
    """The command answers, and plugins are discovered, in the time that torch takes to load."""
    assert not imported(run_python, statement) & {"torch", "numpy", "torchmetrics", "jsonargparse"}


def test_discovering_plugins_does_not_import_a_parser_of_mails(run_python, install, tmp_path):
    """To parse metadata with it would cost the first plugin 11 ms of start-up."""
    install("aa-test")
    statement = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    statement += "from eventloop.plugin.discover import discover; assert discover()[0]\n"
    statement += "print('email' in sys.modules, 'email.parser' in sys.modules)"

    assert run_python(statement).stdout == "True False\n"


@pytest.mark.nightly
def test_an_import_of_torch_would_be_seen(run_python):
    """Control."""
    assert {"torch", "eventloop"} <= imported(run_python, "from eventloop import Task")
