"""Importing plugins one by one."""

from __future__ import annotations

import signal

import pytest

from eventloop.config.configuration import Configuration
from eventloop.config.plugin_flags import Choice
from eventloop.plugin.assemble import Discovery

NAMES = ("aa-test", "bb-test")


def load_tested(*off: str):
    """Returns the plugins that are imported, and the problems of the others."""
    configuration = Configuration(choice=Choice.parse([f"no:{name}" for name in off]))
    discovery = Discovery(configuration)
    chosen = [plugin for plugin in discovery.chosen(configuration) if plugin.name in NAMES]
    plugins = [discovery.loaded(plugin, configuration) for plugin in chosen]
    return (
        [plugin for plugin in plugins if plugin.stage == "loaded"],
        [plugin.failure for plugin in plugins if plugin.failure is not None],
    )


def test_what_the_entry_point_names_is_loaded(install):
    """A class, an instance or a module."""
    install("aa-test", "class Plugin: pass")
    install("bb-test", "x = 1", target="")

    loaded, problems = load_tested()

    assert [type(one.imported).__name__ for one in loaded] == ["type", "module"]
    assert problems == []


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import nosuch", "ModuleNotFoundError: No module named 'nosuch'"),
        ("def (:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("Plug = 1", "AttributeError"),
    ],
)
def test_a_plugin_that_fails_to_import_is_a_problem_with_a_way_out(install, code, cause):
    """One broken package among many must be found by name and be switched off with a flag."""
    install("aa-test", code)
    install("bb-test")

    loaded, (problem,) = load_tested()

    assert [one.found.name for one in loaded] == ["bb-test"]
    for part in (
        cause,
        "aa-test (eventloop-aa-test 1.0)",
        "eventloop.algorithms",
        "_module:Plugin",
    ):
        assert part in str(problem)
    assert '`disable = ["aa-test"]`' in str(problem)
    assert "`pip uninstall eventloop-aa-test`" in str(problem)
    assert problem.__cause__ is not None


def test_all_problems_are_collected(install):
    """Mending one a run is slow."""
    install("aa-test", "1 / 0")
    install("bb-test", "1 / 0")

    _, problems = load_tested()

    assert len(problems) == 2


def test_a_plugin_that_is_off_is_not_imported(install):
    """The way out of a broken one."""
    install("aa-test", "1 / 0")

    assert load_tested("aa-test") == ([], [])


@pytest.fixture
def key():
    """Ctrl-C as at a terminal: a process started in the background may ignore it."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


def test_an_interrupt_passes(install, key):
    """Whoever presses Ctrl-C wants to stop, not to see a problem with a plugin."""
    install("aa-test", "import signal; signal.raise_signal(signal.SIGINT)")

    with pytest.raises(KeyboardInterrupt):
        load_tested()
