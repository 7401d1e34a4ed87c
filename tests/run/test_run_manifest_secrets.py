"""Secrets among options leave the process nowhere: not in the header, nor in files, nor to trackers."""

from __future__ import annotations

import json
import shutil

import pytest

from eventloop import Trainer, hookimpl
from eventloop_testing import tiny_task

SECRET = "hunter2hunter2"
URL = f"https://me:{SECRET}@host/x?api_key={SECRET}"
TASK = """
from eventloop_testing import tiny_task

def task(api_key: str = "", site: str = "", fails: bool = False):
    if fails:
        raise ValueError("failed")
    made = tiny_task()
    made.settings = {"max_duration": "2ba", "device": "cpu", "checkpoint_interval": "1ba"}
    return made
"""
TRACKER = """
from pathlib import Path

from eventloop import hookimpl

class Plugin:
    def __init__(self, token: str = "", headers: dict[str, str] | None = None, fails: bool = False):
        self.fails = fails

    @hookimpl
    def fit_start(self, state):
        Path("sent").write_text(repr(state.manifest) + repr(vars(state.settings)))

    @hookimpl
    def batch_end(self, state):
        if self.fails:
            raise ValueError("failed")
"""
COMMAND = ["fit", "train.py", "--run-dir", "out", "--no-plugins", "-p", "tracker"]
OPTIONS = [
    f"--task.api-key={SECRET}",
    "--task.site", URL,
    "--tracker.token", SECRET,
    "--tracker.headers", json.dumps({"password": SECRET}),
]  # fmt: skip


@pytest.fixture
def folder(clean, install, monkeypatch):
    """The working directory, with a task and a plugin that have options for secrets."""
    install("tracker", TRACKER, group="eventloop.callbacks")
    (clean / "train.py").write_text(TASK)
    monkeypatch.setattr("sys.argv", ["eventloop", *COMMAND, *OPTIONS])
    return clean


def texts(folder):
    """Returns the content of each file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_shows_and_saves_no_secret(run, folder):
    """Header, manifest and each checkpoint, and what a tracker is handed."""
    ran = run(*COMMAND, *OPTIONS)

    assert ran.status == 0, ran.err
    assert "api_key=***" in ran.out
    assert SECRET not in ran.out + ran.err
    files = texts(folder)
    assert len(list((folder / "out" / "checkpoints").iterdir())) > 0
    assert (folder / "sent").exists()
    assert [path for path, data in files.items() if SECRET.encode() in data] == []
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["task"]["options"]["site"] == "https://me:***@host/x?api_key=***"
    assert "--task.api-key=***" in manifest["command_line"]


@pytest.mark.parametrize(
    "more", [["--tracker.fails", "true"], ["--task.fails", "true"], ["--print-config"]]
)
def test_what_else_is_printed_has_no_secret(run, folder, more):
    """The report of a failure lists plugins with options; --print-config all values."""
    ran = run(*COMMAND, *OPTIONS, *more)

    assert ran.out + ran.err
    assert SECRET not in ran.out + ran.err


def test_a_configuration_that_is_printed_sets_no_mask(run, folder):
    """The file would be used with `***` for a password."""
    ran = run(*COMMAND, *OPTIONS, "--print-config")

    lines = [line for line in ran.out.splitlines() if "***" in line]
    assert len(lines) == 4
    assert all(line.lstrip().startswith("# ") for line in lines)


def test_a_run_resumes_with_another_secret_but_not_with_another_url(run, folder):
    """A key that was replaced trains the same; the manifest doesn't have the one before."""
    assert run(*COMMAND, *OPTIONS).status == 0
    shutil.copytree(folder / "out", folder / "copy")
    longer = ["--max-duration", "3ba"]
    others = [option.replace(SECRET, "swordfish") for option in OPTIONS]

    elsewhere = [option.replace("host/x", "host/y") for option in others]
    refused = run(*COMMAND, *elsewhere, "--resume", "auto")
    resumed = run(*COMMAND, *others, "--resume", "auto", *longer, "--allow-config-change")

    assert refused.status == 2
    assert "host/y" in refused.err
    assert "swordfish" not in refused.err
    assert resumed.status == 0, resumed.err
    changes = json.loads((folder / "out" / "manifest.json").read_text())["changes"]
    assert changes == ["settings.max_duration: 2ba -> 3ba"]


class Uploads:
    """A callback that is built in Python."""

    name = "uploads"

    def __init__(self, api_key: str, url: str) -> None:
        self.api_key, self.url = api_key, url

    @hookimpl
    def batch_end(self, state) -> None:
        """Does nothing."""


def test_secrets_of_plugins_that_are_built_in_python_are_masked(tmp_path):
    """Their options are read from attributes; a notebook shows them in a table."""
    with Trainer(
        tiny_task(),
        callbacks=[Uploads(SECRET, URL)],
        autoload=False,
        max_duration="2ba",
        run_dir=tmp_path,
    ) as trainer:
        trainer.fit()

        assert SECRET not in repr(trainer.state.manifest)
        assert SECRET not in trainer._repr_html_()
    assert [path for path, data in texts(tmp_path).items() if SECRET.encode() in data] == []
