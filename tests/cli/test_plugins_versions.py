"""A plugin made for another version of the core: what `plugins`, `plugins check` and `fit` say of it."""

from __future__ import annotations

import json

import pytest

from eventloop import hookspec
from eventloop.hook_markers import declared_hooks
from eventloop.plugin import static_check
from eventloop.plugin.declared_hooks import HOOKS

pytestmark = pytest.mark.usefixtures("no_others")

CODE = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def {}(self, state): ...
"""


@pytest.fixture
def said(run, install, tmp_path, monkeypatch):
    """Installs a plugin, and returns what the three commands say of it."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")

    def said(hook, needs, *flags):
        install("aa-test", CODE.format(hook))
        metadata = tmp_path / "site" / "eventloop_aa_test-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text() + f"Requires-Dist: torch-eventloop{needs}\n")
        task = tmp_path / "task.py"
        task.write_text("from eventloop_testing import tiny_task\ntask = tiny_task\n")
        rows = json.loads(run("plugins", "--json", *flags).out)
        (row,) = (one for one in rows if one["name"] == "aa-test")
        check = run("plugins", "check", *flags)
        return row, check, run("fit", str(task), "--max-duration", "1ba", *flags)

    return said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("hook", "needs"), [("after_everything", ">=0.2,<0.3"), ("batch_done", "<0.1")]
)
def test_one_for_another_minor_version_is_off_and_the_hooks_are_named(said, hook, needs):
    """The next one has a hook that isn't here, the last one had one that has gone."""
    row, check, fit = said(hook, needs)

    assert row["status"] == "off"
    assert row["reason"] == f"needs torch-eventloop{needs}, which has {hook}; 0.1.0 is installed"
    assert check.status == fit.status == 0
    assert row["reason"] in check.out


def test_one_that_is_asked_for_stops_check_and_fit_alike(said):
    """With the lines that end it."""
    _, check, fit = said("after_everything", ">=0.2,<0.3", "-p", "aa-test")

    assert (check.status, fit.status) == (1, 1)
    for text in (check.out, fit.err):
        assert "aa-test was asked for, but needs torch-eventloop>=0.2,<0.3, which has" in text
        assert "pip install 'torch-eventloop>=0.2,<0.3'`, or" in text


def test_a_hook_that_was_renamed_is_named_by_all_three(said, monkeypatch):
    """Its author learns the new name where the plugin is listed, checked or run."""
    gone = {"batch_done": "renamed to batch_end in 0.1"}
    monkeypatch.setattr(HOOKS, "removed", gone)
    monkeypatch.setattr(static_check, "REMOVED_HOOKS", gone)

    row, check, fit = said("batch_done", ">=0.1", "-p", "aa-test")

    what = "no hook is named 'batch_done'; it was renamed to batch_end in 0.1"
    assert (row["status"], row["reason"]) == ("problem", what)
    assert what in check.out
    assert what in fit.err


class Newer:
    """A hook as a later core would declare it."""

    @hookspec(per="run", since="0.3")
    def after_everything(self, state):
        """Fires last."""


def test_a_range_that_is_wider_than_a_hook_is_old_is_a_remark(said, run, monkeypatch):
    """Who has 0.1 would install the plugin, and it would fail there."""
    monkeypatch.setitem(HOOKS, "after_everything", declared_hooks([Newer])["after_everything"])

    _, check, _ = said("after_everything", ">=0.1", "-p", "aa-test")

    assert "the hook was added in torch-eventloop 0.3, but the plugin requires >=0.1" in check.out
    assert "since 0.3" in run("plugins", "hooks", "after_everything").out
