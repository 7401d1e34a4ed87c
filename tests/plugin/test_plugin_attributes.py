"""What plugins say of themselves: read in one place, and a misspelt attribute refused."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from eventloop import PluginError, hookimpl, hookspec
from eventloop.plugin.plugin_attributes import PluginFacts, facts_of, misspelt_facts

ROOT = Path(__file__).parents[2]
NAMES = [one.name for one in dataclasses.fields(PluginFacts)]


@pytest.mark.parametrize(
    ("meant", "misspelt", "value"),
    [
        ("free_options", "free_option", ("path",)),
        ("wakes_with", "wake_with", ("path",)),
        ("requires", "require", ("ema",)),
        ("conflicts", "conflict", ("ema",)),
        ("hookspecs", "hook_specs", object),
        ("off_until_named", "off_until_name", True),
        ("state_per_rank", "state_per_ranks", True),
        ("around_calls", "around_call", lambda self, plugin, hook, state: None),
        ("start_early", "start_eary", staticmethod(lambda: None)),
        ("needs_eval_data", "need_eval_data", True),
        ("shows_progress", "show_progress", True),
        ("takes_turns", "takes_turn", "blend"),
        ("loss_splits", "loss_split", False),
        ("loss_may_broadcast", "loss_may_broadcasts", True),
    ],
)
def test_a_misspelt_attribute_is_refused(make_trainer, meant, misspelt, value):
    """It would say nothing: a resumed run refused, a plugin that never sleeps."""
    kind = type("Says", (), {misspelt: value, "batch_end": hookimpl(lambda self, state: None)})

    with pytest.raises(PluginError, match=f"is named '{misspelt}'; the closest is '{meant}'"):
        make_trainer(algorithms=[kind()])


def test_a_misspelt_attribute_of_a_task_is_refused(make_trainer):
    """Its settings would have no effect."""

    class Own:
        default_setting = {"autoload": "callbacks"}

        @hookimpl
        def build_model(self):
            return nn.Linear(1, 1)

    with pytest.raises(PluginError, match="'default_setting'; the closest is 'default_settings'"):
        make_trainer(Own())


def test_what_is_a_plugins_own_affair_is_left_alone(make_trainer):
    """Options, other methods, what is imported, and attributes of an instance."""

    class Own:
        names, hookspec = ("a",), hookspec

        def __init__(self, require=True):
            self.require, self.conflict = require, 1

        def conflict_(self):
            """A method of its own."""

        @hookimpl
        def batch_end(self, state): ...

    module = ModuleType("own")
    module.hookspec = hookspec

    assert list(misspelt_facts(Own())) == list(misspelt_facts(module)) == []
    make_trainer(algorithms=[Own()])


def test_a_text_is_a_tuple_of_one():
    """`free_options = "path"` would be four options, of a letter each."""

    class Says:
        requires = free_options = "path"

    assert facts_of(Says()).requires == facts_of(Says).free_options == ("path",)


def test_every_attribute_is_documented():
    """In the table of one page."""
    page = (ROOT / "docs/how-to/write-a-plugin.md").read_text()
    table = page.partition("## What a plugin says about itself")[2].partition("\n## ")[0]

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == NAMES


def test_no_other_file_reads_them_by_their_names():
    """`getattr(plugin.target, "requires", ())` elsewhere would be a second declaration."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in (*(ROOT / "src").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
        for argument in node.args[1:2]
        if isinstance(argument, ast.Constant) and argument.value in set(NAMES) - {"name"}
    ]

    assert found == []
