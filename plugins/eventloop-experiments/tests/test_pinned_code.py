"""What all runs of a folder train with, compared before each run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventloop import ResumeError
from eventloop.commands import Command, prepare, read_arguments
from eventloop_experiments.runs import Outcome, PinnedCode, RunsFolder

COMMAND = Command("sweep", "Searches.")
PLUGIN = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def fit_start(self, state):
        pass
"""


def install(folder, version, code=PLUGIN):
    """Installs a callback as pip leaves it."""
    (folder / "shout_module.py").write_text(code)
    for one in folder.glob("eventloop_shout-*.dist-info"):
        one.rename(folder / f"eventloop_shout-{version}.dist-info")
    info = folder / f"eventloop_shout-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: eventloop-shout\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text("[eventloop.callbacks]\nshout = shout_module:Plugin\n")
    (info / "REQUESTED").touch()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A task with a module beside it, and a folder on `sys.path` in which nothing is installed."""
    modules = dict(sys.modules)
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "helper.py").write_text("WIDTH = 3\n")
    (tmp_path / "pinned.py").write_text(
        "from helper import WIDTH\nfrom eventloop_testing import tiny_task as task\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    yield prepare(read_arguments(["pinned.py"], COMMAND), COMMAND)
    for name in sys.modules.keys() - modules.keys():
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def code_of(job):
    return PinnedCode(job, "sweep", Path("here"))


def stored(job):
    """What the runs began with, as it comes back from a file."""
    return json.loads(json.dumps(code_of(job).begin(None, is_allowed=False)))


def test_a_run_is_not_begun_once_a_plugin_was_installed(job):
    """It would take part in the runs from there on, and in no other."""
    code = code_of(job)
    code.begin(None, is_allowed=False)

    begun = []
    for one in code.guarded("abc"):
        begun.append(one)
        install(Path("site"), "1.0")

    assert begun == ["a"]
    message = str(code.problem)
    assert "plugin shout: not there -> eventloop-shout 1.0" in message
    assert "--run-dir here --allow-code-change" in message


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda: install(Path("site"), "2.0"), "shout: eventloop-shout 1.0 -> eventloop-shout 2.0"),
        (lambda: Path("helper.py").write_text("WIDTH = 4\n"), "helper.py: sha256:"),
        (lambda: Path("pinned.py").write_text("task = 1\n"), "pinned.py: sha256:"),
        (lambda: install(Path("site"), "1.0", f"{PLUGIN}\n# edited\n"), "shout: shout_module"),
    ],
)
def test_a_start_with_other_code_is_refused(job, change, line):
    """A second worker and one that goes on another day train what the first one did."""
    install(Path("site"), "1.0")
    then = stored(job)
    code_of(job).begin(then, is_allowed=False)

    change()

    with pytest.raises(ResumeError, match=line):
        code_of(job).begin(then, is_allowed=False)
    now = code_of(job).begin(then, is_allowed=True)
    assert code_of(job).begin(now, is_allowed=False) == now


@dataclass(frozen=True)
class Row:
    """A run of a folder."""

    name: str
    argv: tuple[str, ...] = ()

    @property
    def place(self):
        return Path(self.name)


def left_by(folder, name, plugins):
    """What a run leaves that found these plugins; None for one that failed before."""
    run = Row(name)
    folder.run_dir(run).mkdir(parents=True)
    if plugins is not None:
        listed = [
            {"name": one, "distribution": dist, "version": "1.0", "source": source}
            for one, dist, source in plugins
        ]
        content = json.dumps({"plugins": listed})
        (folder.run_dir(run) / "manifest.json").write_text(content)
        folder.result(run).write_text("{}")
    return Outcome(run, None if plugins is None else {}, "", folder.log(run))


def test_a_run_that_was_begun_during_an_installation_does_not_count(job):
    """It is compared before it starts, and looks for plugins a moment later."""
    code, folder = code_of(job), RunsFolder(Path("here"), "sweep")
    code.begin(None, is_allowed=False)
    shout = ("shout", "eventloop-shout", "entry point")
    own = ("own", "", "Task(algorithms=...)")

    before = [*code.checked([left_by(folder, "first", [own])], folder)]
    install(Path("site"), "1.0")
    ended = [left_by(folder, "early", [own]), left_by(folder, "late", [own, shout])]
    ended.append(left_by(folder, "failed", None))
    early, late, failed = code.checked(ended, folder)

    assert [one.was_killed for one in (*before, early, late, failed)] == [False] * 2 + [True] * 2
    assert late.content is None
    assert [*folder.run_dir(late.run).iterdir()] == []  # there, as of a run that was killed
    assert not folder.result(late.run).exists()
    assert folder.result(early.run).exists()
    assert "plugin shout: not there" in str(code.problem)
