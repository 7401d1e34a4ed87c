"""Run folders of a stranger's: no command writes, reads, waits or runs what is put in them.

Rows are names that a run opens, kinds of what may stand there, and commands. A file that a run opens
and that has no row here fails `test_every_name_that_a_run_opens_has_a_row`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eventloop.cli import main
from eventloop.distributed.process_ends import details, exit_status, first_line
from eventloop.files import run_folder
from eventloop.run.differences import Allowed
from eventloop_testing.case import isolated_trainer

ROOT = Path(__file__).parents[2]
PLUGINS = ("jsonl", "profile", "report", "tensorboard", "trace")
IMPORTED = (
    *("eventloop_jsonl", "eventloop_profile", "eventloop_report.figures", "eventloop_tensorboard"),
    "eventloop_trace",
    *("eventloop.cli.checkpoints_diff", "eventloop.cli.eval", "eventloop.cli.export"),
)
DEADLINE_S = 60
LAST = "ba00000003"

# Every name that a fit opens in its folder, as `_row_of` writes it, with one that stands for it. Those
# in ANY are read by no name of their own or replaced as links are: nothing has to be refused.
FILES = {
    ".lock": ".lock",
    ".lock.json": ".lock.json",
    "..lock.json.new": "..lock.json.new",
    "manifest.json": "manifest.json",
    ".manifest.json.new": ".manifest.json.new",
    "metrics.jsonl": "metrics.jsonl",
    "profile.json": "profile.json",
    "trace.json": "trace.json",
    "report.html": "report.html",
    ".report.html.new": ".report.html.new",
    "report/*.png": "report/loss.png",
    "report/.*.png.new": "report/.loss.png.new",
    "checkpoints/ba*/manifest.json": f"checkpoints/{LAST}/manifest.json",
    "checkpoints/ba*/*.json": f"checkpoints/{LAST}/clock.json",
    "checkpoints/ba*/*.safetensors": f"checkpoints/{LAST}/model.safetensors",
}
FOLDERS = {
    "checkpoints": "checkpoints",
    "checkpoints/ba*": f"checkpoints/{LAST}",
    "report": "report",
    "tensorboard": "tensorboard",
}
# Their names have a time or random digits in them: no stranger can put anything there.
UNGUESSED = {"tensorboard/events.*", "*-profile.json", "*-trace.json", "checkpoints/.tmp-ba*"}


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch '{marker}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _socket(path: Path, _outside: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)  # the path of a socket has 108 bytes
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, outside: _link(path, outside / "file"),
    "link to nothing": lambda path, outside: _link(path, outside / "new"),
    "link to a folder": lambda path, outside: _link(path, outside / "folder"),
    "link to a pipe": lambda path, outside: _link(path, outside / "pipe"),
    "link to a device": lambda path, outside: _link(path, Path("/dev/zero")),
    "link to itself": lambda path, outside: _link(path, Path(path.name)),
    "relative link": lambda path, outside: _link(
        path, Path(os.path.relpath(outside / "file", path.parent))
    ),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": _socket,
    "folder": lambda path, outside: path.mkdir(),
    "hard link": lambda path, outside: path.hardlink_to(outside / "file"),
    "pickle": lambda path, outside: shutil.copy(outside / "file", path),
}
REFUSED = [one for one in KINDS if one not in ("hard link", "pickle")]
# With every change; the others nightly.
OFTEN = {
    (".lock.json", "link to a file"),
    (".lock.json", "pipe"),
    ("manifest.json", "link to a file"),
    ("metrics.jsonl", "link to a file"),
    ("report.html", "link to a file"),
    ("checkpoints/ba*/*.safetensors", "link to a file"),
    ("checkpoints", "link to a folder"),
}


class Outcome(NamedTuple):
    """What came of a command.

    Args:
        status: of its process; negative where a signal ended it.
    """

    status: int
    text: str


def _in_fork(function: Callable[[], int], output: Path) -> Outcome:
    """Calls a function in a process of its own, which SIGALRM ends at the deadline."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(DEADLINE_S)
            warnings.simplefilter("default")
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            status = function()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Outcome(status, output.read_text(errors="replace"))


ALL = "metrics.jsonl report tensorboard profile.json trace.json"


def _fit(folder: Path, max_duration: str = "2ep", about: str = ALL) -> int:
    """Trains from what is there, with the plugins whose files are in a text."""
    from eventloop_jsonl import Jsonl
    from eventloop_profile import Profile
    from eventloop_report import Report
    from eventloop_tensorboard import Tensorboard
    from eventloop_trace import Trace

    all_of_them = {
        "metrics.jsonl": lambda: Jsonl(),
        "report": lambda: Report(),
        "tensorboard": lambda: Tensorboard(),
        "profile.json": lambda: Profile(wait=0, warmup=1, active=1),
        "trace.json": Trace,
    }
    callbacks = [make() for name, make in all_of_them.items() if name in about]
    try:
        with isolated_trainer(
            folder,
            callbacks=callbacks,
            max_duration=max_duration,
            checkpoint_interval="1ep",
            allowed=Allowed(config_change=True),
        ) as trainer:
            trainer.fit()
    except BaseException as error:
        sys.stderr.write(f"{first_line(error)}\n{details(error)}")
        return exit_status(error)
    return 0


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports once what every fork would take seconds for."""
    sys.path += [str(ROOT / "plugins" / f"eventloop-{one}" / "src") for one in PLUGINS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED:
            importlib.import_module(name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a folder with a whole run of two checkpoints, and a task file for it."""
    folder = tmp_path_factory.mktemp("whole")
    for duration in ("2ba", "1ep"):
        outcome = _in_fork(lambda duration=duration: _fit(folder, duration), folder / "output")
        assert outcome.status == 0, outcome.text
    (folder / "task.py").write_text(
        "from eventloop_testing.case import tiny_task\ndef task():\n    return tiny_task()\n"
    )
    return folder


@pytest.fixture
def place(whole, tmp_path):
    """Returns a copy of the run, and beside it what no command may touch."""
    shutil.copytree(whole, tmp_path / "of a stranger")
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for path in (outside / "file", outside / "folder" / "file"):
        path.write_bytes(pickle.dumps(Code(tmp_path / "marker")))
    os.mkfifo(outside / "pipe")
    return tmp_path


def _standing(outside: Path, *, read_is_seen: bool) -> dict[str, object]:
    """Describes all that is outside, without reading it: a read would show in `st_atime`."""
    found: dict[str, object] = {}
    for path in sorted(outside.rglob("*")):
        there = path.lstat()
        times = (there.st_mtime_ns, there.st_atime_ns if read_is_seen else 0)
        found[str(path.relative_to(outside))] = (there.st_mode, there.st_size, *times)
    return found


def _attack(place: Path, name: str, kind: str, command: Callable[[Path], int]) -> Outcome:
    """Puts something hostile into the run, runs a command, and checks what is outside."""
    folder, outside = place / "of a stranger", place / "outside"
    path = folder / "run" / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        # What the link leads to looks like what was there, so that it is worth following.
        shutil.rmtree(outside / "folder")
        path.rename(outside / "folder")
    path.unlink(missing_ok=True)
    KINDS[kind](path, outside)
    for one in outside.rglob("*"):
        if one.is_file():
            os.utime(one, ns=(10**18, 2 * 10**18))  # a read is noted where it is older than a write
    read_is_seen = kind != "hard link"  # which has the file under a name of the run's own
    before = _standing(outside, read_is_seen=read_is_seen)

    outcome = _in_fork(lambda: command(folder), place / "output")

    assert outcome.status >= 0, f"it took longer than {DEADLINE_S} s, or was killed"
    assert outcome.status != 70, outcome.text
    assert "Traceback" not in outcome.text
    assert _standing(outside, read_is_seen=read_is_seen) == before
    assert not (place / "marker").exists()
    return outcome


def _named_with_a_fix(outcome: Outcome, name: str) -> bool:
    return outcome.status != 0 and Path(name).name in outcome.text and "fix" in outcome.text


def _row(*values: str, often: bool) -> Any:
    return pytest.param(*values, marks=() if often else pytest.mark.nightly)


FITS = [
    _row(name, kind, often=(name, kind) in OFTEN)
    for name in [*FILES, *FOLDERS]
    for kind in REFUSED
    if not (name in FOLDERS and kind == "folder")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "kind"), FITS)
def test_a_fit_refuses_it_and_touches_nothing_outside(name, kind, place):
    """What isn't a file of the run's own is named; a checkpoint that can't be used is passed over."""
    path = (FILES | FOLDERS)[name]

    outcome = _attack(place, path, kind, partial(_fit, about=name))

    if name.startswith("checkpoints/"):
        assert outcome.status == 0, outcome.text
    else:
        assert _named_with_a_fix(outcome, path), outcome.text


APPENDED = (".lock", "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        _row(name, kind, often=name in APPENDED)
        for name in FILES
        for kind in ("hard link", "pickle")
    ],
)
def test_a_fit_leaves_the_other_names_of_a_file_as_they_are(name, kind, place):
    """What is appended to may have no second name; what is replaced loses only this one."""
    outcome = _attack(place, FILES[name], kind, partial(_fit, about=name))

    if kind == "hard link" and name in APPENDED:
        assert _named_with_a_fix(outcome, FILES[name])
        assert "cp " in outcome.text
    else:
        assert outcome.status == 0, outcome.text


def _main(*argv: str) -> Callable[[Path], int]:
    def command(folder: Path) -> int:
        os.chdir(folder)
        os.environ["EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return main(argv)

    return command


COMMANDS = {
    "list": _main("checkpoints", "list", "run"),
    "list quick": _main("checkpoints", "list", "run", "--quick"),
    "verify": _main("checkpoints", "verify", "run"),
    "diff": _main("checkpoints", "diff", "run", "run"),  # what is named may be a link
    "eval": _main("eval", "task.py", "--device", "cpu", "--weights", "run"),
    "export": _main("export", "run", "weights.safetensors"),
}
READ = ("manifest.json", *(one for one in [*FILES, *FOLDERS] if one.startswith("checkpoints")))


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        _row(name, kind, command, often=(name, kind) in OFTEN and command == "list")
        for name in READ
        for kind in REFUSED
        for command in COMMANDS
    ],
)
def test_a_command_that_reads_touches_nothing_outside(name, kind, command, place):
    """Whether it can do without the file or not."""
    path = (FILES | FOLDERS)[name]

    outcome = _attack(place, path, kind, COMMANDS[command])

    assert "isn't expected" not in outcome.text
    if name == "checkpoints" and kind != "folder":
        assert _named_with_a_fix(outcome, path), outcome.text


@pytest.mark.parametrize("name", ["..lock.json.new", "report", "metrics.jsonl", ".lock"])
def test_without_descriptors_of_folders_it_is_refused_too(name, place, monkeypatch):
    """As on Windows, where a folder can't be entered by its descriptor."""
    monkeypatch.setattr(run_folder, "_HAS_DIR_FD", False)

    fit = partial(_fit, about=name)
    outcome = _attack(place, (FILES | FOLDERS)[name], "link to a file", fit)

    assert _named_with_a_fix(outcome, name)


def _row_of(path: str) -> str:
    """Returns the last part of a path, as the rows have it: without what changes from run to run."""
    name = Path(path).name
    for found, row in (
        (r"\.tmp-ba\d{8}-.*", ".tmp-ba*"),
        (r"(\.was-)?ba\d{8}.*", "ba*"),
        (r"\.[0-9a-f]{16}-", "*-"),
        (r"events\.out\..*", "events.*"),
        (r"\.[a-z-]+\.png\.new", ".*.png.new"),
        (r"[a-z-]+\.png", "*.png"),
    ):
        name = re.sub(f"^{found}", row, name)
    is_part = path.startswith("/checkpoints/") and path.count("/") == 3
    return f"*{Path(name).suffix}" if is_part and name != "manifest.json" else name


def _fit_and_tell(folder: Path) -> int:
    """Trains, and prints each name in the run's folder that Python opens, lists, makes or gives."""
    run = os.path.realpath(folder / "run")
    opened: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.scandir", "os.rename"):
            return
        one = arguments[event == "os.rename"]  # what gets the name
        if not isinstance(one, int):
            path = str(one)
            # Relative to a descriptor it is a name alone.
            if path.startswith(f"{run}/") or "/" not in path:
                opened.add(_row_of(path.removeprefix(run)))

    sys.addaudithook(note)
    status = _fit(folder)
    sys.stdout.writelines(f"row {one}\n" for one in sorted(opened))
    return status


@pytest.mark.nightly
def test_every_name_that_a_run_opens_has_a_row(place):
    """A new file of the core or of a plugin has to be attacked, too: put it into the tables above."""
    outcome = _in_fork(lambda: _fit_and_tell(place / "of a stranger"), place / "output")

    rows = {Path(one).name for one in (*FILES, *FOLDERS, *UNGUESSED)}
    assert outcome.status == 0, outcome.text
    found = {line[4:] for line in outcome.text.splitlines() if line.startswith("row ")}
    # `run/git_commit.py` removes a temporary folder of its own, outside of the run's, name by name.
    assert found - {"", ".", "info", "refs"} == rows
