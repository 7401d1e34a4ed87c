"""The registry: one record of each plugin, with its stage and reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eventloop.config.configuration import Configuration
from eventloop.config.plugin_flags import Choice
from eventloop.errors import PluginError
from eventloop.hook_markers import hookimpl
from eventloop.plugin.assemble import Discovery, assemble
from eventloop.plugin.records import Plugin
from eventloop.plugin.registry import Registry, arrange

PLUGIN = """
from eventloop import hookimpl

class Plugin:
    {attributes}

    def __init__(self{options}):
        {body}

    @hookimpl
    def batch_end(self, state): ...
"""
KINDS = {
    "active": {},
    "dormant": {"options": ", *, teacher: str"},
    "fails": {"body": "1 / 0"},
    "off": {},
}


@pytest.fixture
def installed(install):
    """Installs a plugin of each kind; returns the configuration."""
    for name, parts in KINDS.items():
        whole = {"attributes": "pass", "options": "", "body": "pass"} | parts
        install(f"{name}-test", PLUGIN.format(**whole))
    install("broken-test", "1 / 0")
    return Configuration(choice=Choice.parse(["no:off-test"]))


def stages(registry: Registry) -> dict[str, str]:
    return {
        plugin.name.removesuffix("-test"): plugin.stage
        for plugin in registry.discovered
        if plugin.name.endswith("-test")
    }


def test_each_plugin_has_the_stage_that_it_reached(installed):
    """One record says what became of it, for every command and for the run."""
    registry = assemble(installed)

    assert stages(registry) == {
        "active": "active",
        "broken": "failed",
        "dormant": "dormant",
        "fails": "failed",
        "off": "off",
    }
    explained = {name: registry.explain(registry.find(f"{name}-test")) for name in stages(registry)}
    assert explained["active"] == ("active", "")
    assert explained["off"] == ("off", "-p no:off-test")
    assert explained["dormant"] == ("off", "waiting for --dormant-test.teacher")
    assert explained["fails"][0] == explained["broken"][0] == "problem"
    assert "fails-test can't be built: ZeroDivisionError" in explained["fails"][1]
    assert "can't be imported: ZeroDivisionError" in explained["broken"][1]


def test_a_command_and_a_run_decide_alike(installed):
    """A run raises the problems that a command shows."""
    shown = assemble(installed)
    discovery = Discovery(installed)

    of_run = assemble(installed, discovery, task=Plugin("task", "task", object()))

    assert stages(of_run) == stages(shown)
    assert [str(one) for one in of_run.problems] == [str(one) for one in shown.problems]
    with pytest.raises(PluginError, match="fails-test can't be built"):
        of_run.raise_problems()


def test_a_registry_is_not_changed_when_plugins_drop_out(plugin):
    """A second one is made: whoever holds the first still sees the plugins that it was built of."""
    plugins = [plugin(name, batch_end=lambda state: None) for name in ("a", "b")]
    registry = arrange(plugins)

    smaller = registry.without({"a": "no images"})

    assert [one.name for one in registry.plugins] == ["a", "b"]
    assert [one.name for one in smaller.plugins] == ["b"]
    assert [(one.name, one.reason, one.kind) for one in smaller.off] == [("a", "no images", "task")]
    assert [one.plugin.name for one in smaller.implementations["batch_end"]] == ["b"]


def test_a_plugin_that_another_requires_does_not_drop_out(plugin):
    """The other one would train without what it is built on."""

    class Needs:
        requires = ("a",)

        @hookimpl
        def batch_end(self): ...

    registry = arrange(
        [plugin("a", batch_end=lambda state: None), Plugin("b", "callback", Needs())]
    )

    with pytest.raises(PluginError, match="b requires a, which is off: no images"):
        registry.without({"a": "no images"})


def test_a_plugin_that_can_not_be_inspected_is_the_only_one_that_fails(install):
    """The others are still validated and ordered; the message names the one."""
    whole = PLUGIN.format(attributes="pass", options="", body="pass")
    install("aa-test", whole)
    install("odd-test", whole + "\nPlugin.batch_end.__signature__ = 3\n")
    names = ("aa-test", "odd-test")
    choice = Choice(insist=names, autoload=False, autoload_reason="test")

    registry = assemble(Configuration(choice=choice))

    assert [one.name for one in registry.plugins] == ["task", "aa-test"]
    (problem,) = registry.problems
    assert problem.what.startswith("odd-test can't be inspected: TypeError: unexpected object 3")


def test_a_run_reads_no_sources_of_plugins(tiny, install):
    """What only `eventloop plugins` shows costs a run nothing."""
    install("aa-test", PLUGIN.format(attributes="pass", options="", body="pass"))
    code = (
        "import sys\nfrom eventloop.cli import main\n"
        "main(['fit', 'tiny.py', '--max-duration', '1ba', '--no-plugins', '-p', 'aa-test'])\n"
        "print([name for name in sys.modules if name.startswith('eventloop.plugin.static')])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tiny
    )

    assert done.stdout.splitlines()[-1] == "[]"
