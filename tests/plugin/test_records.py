"""Records: what messages call a plugin, and how they say to go on without it."""

from __future__ import annotations

import pytest
from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Local
from eventloop.fixes import for_command
from eventloop.plugin.records import FROM_ENTRY_POINT, Found, Plugin

POINT = EntryPoint("watch", "watch.py:Watch", "eventloop.callbacks")
INSTALLED = Found("watch", "callback", POINT, "eventloop-watch", "0.2")
BY_FLAG = Found("watch", "callback", POINT, "", "", local=Local("watch.py:Watch"))
# How a plugin came, by what messages say of it.
WAYS = {
    "installed": (
        Plugin("watch", "callback", None, "eventloop-watch", "0.2", FROM_ENTRY_POINT),
        "watch (eventloop-watch 0.2)",
        "switch the plugin off with `-p no:watch`",
    ),
    "a file that a flag names": (
        Plugin("watch", "callback", None, source="watch.py:Watch", found=BY_FLAG),
        "watch (watch.py:Watch)",
        "leave `-p watch.py:Watch` out",
    ),
    "a flag of the command": (
        Plugin("dry-run", "callback", None, source="--dry-run", by="flag"),
        "dry-run (--dry-run)",
        "leave `--dry-run` out",
    ),
    "Trainer": (
        Plugin("watch", "callback", None, source="Trainer(callbacks=...)"),
        "watch (Trainer(callbacks=...))",
        "leave the plugin out of `callbacks=[...]`",
    ),
    "Task": (
        Plugin("watch", "callback", None, source="Task(callbacks=...)", by="Task"),
        "watch (Task(callbacks=...))",
        "run with `-p no:watch`, or leave it out of Task(callbacks=[...])",
    ),
    "the task": (Plugin("task", "task", None), "task", ""),
}


@pytest.mark.parametrize(("plugin", "origin", "way_out"), WAYS.values(), ids=WAYS)
def test_a_problem_names_its_plugin_and_the_way_out(plugin, origin, way_out):
    """The way out undoes what brought the plugin; the task has none."""
    with for_command():
        problem = plugin.problem("it broke", "fix it", method="batch_end")

    assert problem.facts["plugin"] == f"{origin}, batch_end"
    assert problem.fix == (f"fix it, or {way_out}" if way_out else "fix it")


@pytest.mark.parametrize(
    ("found", "origin", "way_out"),
    [
        (INSTALLED, "watch (eventloop-watch 0.2)", "switch the plugin off with `-p no:watch`"),
        (BY_FLAG, "watch (watch.py:Watch)", "leave `-p watch.py:Watch` out"),
    ],
)
def test_what_is_not_imported_yet_is_named_likewise(found, origin, way_out):
    """An import that fails is told in the words of what fails later."""
    with for_command():
        assert (found.origin, found.way_out) == (origin, way_out)
    assert found.problem("it broke", "fix it").subjects == (found,)
