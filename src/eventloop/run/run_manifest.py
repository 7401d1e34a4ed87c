"""The manifest: what a run is made of, so that it can be told, compared and made again."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import eventloop
from eventloop.errors import EventloopError
from eventloop.files.bounded_json import MAX_BYTES, from_bytes
from eventloop.files.disk import CorruptFileError
from eventloop.files.run_folder import RunFolder
from eventloop.hooks import hookimpl
from eventloop.naming import plain
from eventloop.plugin.lock import order_digest
from eventloop.urls import hidden

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.plugin.assembly import Assembly
    from eventloop.run.start import Start
    from eventloop.state import State

FILE = "manifest.json"
_OF_A_START = ("started", "resumed", "changes", "command_line", "versions", "git", "device")


def manifest_of(assembly: Assembly, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Describes a run: plugins, their order, settings, versions, command line, commit.

    Returns:
        Values that JSON can hold.
    """
    commit, is_dirty = _git_commit(Path.cwd())
    return {
        "plugins": [
            {
                "name": one.name,
                "role": one.role,
                "distribution": one.distribution,
                "version": one.version,
                "source": one.source,
                "options": {name: plain(value) for name, value in one.options.items()},
            }
            for one in assembly.plugins
            if one.role in ("algorithm", "callback")
        ],
        "off": [
            {
                "name": one.found.name,
                "version": one.found.version,
                "reason": one.reason,
                "kind": one.kind,
            }
            for one in assembly.off
        ],
        "owners": {one.action: one.owner.name for one in assembly.decisions()},
        "order": order_digest(assembly.implementations),
        "settings": {name: plain(value) for name, value in vars(settings).items()},
        "device": str(device),
        "versions": {
            "eventloop": eventloop.__version__,
            "torch": str(torch.__version__),
            "torchmetrics": version("torchmetrics"),
            "python": platform.python_version(),
        },
        "command_line": [hidden(one) for one in sys.argv],
        "git": {"commit": commit, "dirty": is_dirty},
    }


def write_manifest(
    manifest: Mapping[str, Any],
    run_dir: Path,
    *,
    resumed: str | None = None,
    changes: Sequence[str] = (),
) -> Path:
    """Writes a manifest into the folder of its run, which is made if it isn't there.

    It tells of the start under way. What one that stands there tells of earlier starts is kept, as
    `earlier_starts`. A kill leaves the old one or the new one.

    Args:
        resumed: the checkpoint that this start goes on from.
        changes: what differs from the run as it was begun.

    Raises:
        EventloopError: it can't be written.
    """
    path, files = run_dir / FILE, RunFolder(run_dir)
    now = {
        **manifest,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed": resumed,
        "changes": list(changes),
        "earlier_starts": _earlier_starts(files),
    }
    try:
        files.write(FILE, json.dumps(now, indent=2).encode("ascii") + b"\n")
    except OSError as error:
        raise EventloopError(
            f"the manifest of the run can't be written to {path}: {error.strerror or error}",
            fix="free space, or give another run_dir",
        ) from error
    return path


def _earlier_starts(files: RunFolder) -> list[Any]:
    """Returns what a manifest tells of its start and of those before; [] where it can't be read."""
    try:
        found = from_bytes(files.read(FILE, MAX_BYTES + 1))
        json.dumps([[[found]]], indent=2)  # takes more levels of the stack than reading does
    except (OSError, CorruptFileError, RecursionError):
        return []
    if not isinstance(found, dict) or "started" not in found:
        return []
    before = found.get("earlier_starts")
    known = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    one = {key: found.get(key) for key in _OF_A_START}
    return [*known, one]


@functools.cache
def _git_commit(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the commit that is checked out, and whether anything differs from it; None without."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit.strip(), bool(_git(folder, "status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=5
    )
    return result.stdout


class RunFile:
    """Writes `manifest.json` when a trainer's first fit begins; a plugin of the core.

    It stands after what takes the run's lock.

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._is_written = False

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Writes it, once."""
        if self._is_written:
            return
        problem = None
        if state.rank == 0:
            start = self._start
            try:
                write_manifest(
                    state.manifest, state.run_dir, resumed=start.resumed, changes=start.changes
                )
            except EventloopError as error:
                problem = error
        (problem, *_) = state.all_gather(problem)
        if problem is not None:
            raise problem
        self._is_written = True
