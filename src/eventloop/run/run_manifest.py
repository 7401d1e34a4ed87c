"""The manifest: describes a run, so that it can be compared and reproduced."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import eventloop
from eventloop.errors import EventloopError, as_first
from eventloop.files.run_folder import RunFolder, read_json
from eventloop.hook_markers import hookimpl
from eventloop.naming import has_function, json_value
from eventloop.plugin.lock_digests import order_digest
from eventloop.run.git_commit import git_commit
from eventloop.secret_values import shown_options, shown_words
from eventloop.signals import status_of

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.plugin.records import Plugin
    from eventloop.plugin.registry import Registry
    from eventloop.run.resume import Start
    from eventloop.state import State

RUN_MANIFEST = "manifest.json"
_MAX_SCRIPT_BYTES = 100_000
# The entries of a manifest that describe a single start, and are kept for earlier starts.
_START_KEYS = ("started", "resumed", "changes", "command_line", "versions", "git", "device", "end")


def manifest_of(assembly: Registry, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Returns the description of a run, as JSON values, with secrets masked."""
    commit, is_dirty = git_commit(Path.cwd())
    return {
        "plugins": [
            _plugin_entry(plugin)
            for plugin in assembly.plugins
            if plugin.role in ("algorithm", "callback")
        ],
        "off": [
            {
                "name": plugin.name,
                "version": plugin.version,
                "reason": str(plugin.reason),
                "kind": plugin.kind,
            }
            for plugin in assembly.off
        ],
        "owners": {decision.action: decision.owner.name for decision in assembly.decisions()},
        "order": order_digest(assembly.implementations),
        "settings": json_value(shown_options(vars(settings))),
        "device": str(device),
        "versions": {
            "eventloop": eventloop.__version__,
            "torch": str(torch.__version__),
            "torchmetrics": version("torchmetrics"),
            "python": platform.python_version(),
        },
        "command_line": shown_words(sys.argv),
        "git": {"commit": commit, "dirty": is_dirty},
    }


def _plugin_entry(plugin: Plugin) -> dict[str, Any]:
    functions = [name for name, value in plugin.options.items() if has_function(value)]
    return {
        "name": plugin.name,
        "role": plugin.role,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "source": plugin.source,
        "options": json_value(shown_options(plugin.options)),
        "free": sorted(plugin.facts.free_options),
        "functions": sorted(functions),
    }


def write_manifest(
    manifest: Mapping[str, Any],
    run_dir: Path,
    *,
    resumed: str | None = None,
    changes: Sequence[str] = (),
) -> Path:
    """Writes a manifest into the folder of its run, atomically.

    The manifest describes the current start of the run; earlier starts are moved to `earlier_starts`.

    Args:
        resumed: the checkpoint from which this start resumes.
        changes: the differences from the run when it began.

    Raises:
        EventloopError: the file can't be written.
    """
    content = {
        **manifest,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed": resumed,
        "changes": list(changes),
        "end": None,
        "earlier_starts": _earlier_starts(read_json(run_dir, RUN_MANIFEST)),
    }
    return _put(content, run_dir)


def _put(manifest: Mapping[str, Any], run_dir: Path) -> Path:
    path = run_dir / RUN_MANIFEST
    try:
        RunFolder(run_dir).write(
            RUN_MANIFEST, json.dumps(manifest, indent=2).encode("ascii") + b"\n"
        )
    except OSError as error:
        raise EventloopError(
            f"the manifest of the run can't be written to {path}: {error.strerror or error}",
            fix="free space, or give another run_dir",
        ) from error
    return path


def _earlier_starts(manifest: Mapping[str, Any]) -> list[Any]:
    """Returns the descriptions of all starts in a manifest; [] for {}."""
    if "started" not in manifest:
        return []
    starts = []
    earlier_starts = manifest.get("earlier_starts")
    if isinstance(earlier_starts, list):  # the file may have been edited
        starts = [start for start in earlier_starts if isinstance(start, dict)]
    last_start = {key: manifest.get(key) for key in _START_KEYS}
    return [*starts, last_start]


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """Returns the model's class, the number of all parameters, and the number of trained parameters.

    Uninitialised lazy parameters count as 0.
    """
    shaped = (param for param in model.parameters() if not is_lazy(param))
    sizes = [(param.numel(), param.requires_grad) for param in shaped]
    return {
        "model": type(model).__qualname__,
        "total": sum(size for size, _ in sizes),
        "trained": sum(size for size, is_trained in sizes if is_trained),
    }


def _script() -> dict[str, str]:
    """Returns the path, digest and source of the script that Python runs; {} in an interactive session."""
    if (name := getattr(sys.modules["__main__"], "__file__", None)) is None:
        return {}
    try:
        data = Path(name).read_bytes()
    except OSError:
        return {}
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    is_short = len(data) <= _MAX_SCRIPT_BYTES
    digest = hashlib.sha256(data).hexdigest()
    return {"path": name, "digest": f"sha256:{digest}", "source": text if is_short else ""}


def announce_off(state: State, way_in: str) -> None:
    """Writes a line with the algorithms that autoload="callbacks" leaves inactive.

    Args:
        way_in: the argument that activates an algorithm: `algorithms=[...]`.
    """
    off = state.manifest["off"]
    names = sorted(plugin["name"] for plugin in off if plugin["kind"] == "autoload")
    if names and state.rank == 0 and state.settings.autoload == "callbacks":
        sys.stderr.write(f"eventloop: off, unless passed in {way_in}: {', '.join(names)}\n")


class RunFile:
    """Writes `manifest.json` into the folder of a run; a plugin of the core.

    If the user named the folder, the file is written when the first fit begins, after the lock was
    acquired. A folder with a generated name is created with the run's first file, which may come later
    or never, and the manifest follows as soon as the folder exists.
    """

    __slots__ = ("_has_begun", "_is_named", "_is_written", "_start")

    def __init__(self, start: Start, *, is_named: bool) -> None:
        self._start = start
        self._is_named = is_named
        self._is_written = False
        self._has_begun = False

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Writes the manifest at the first fit; a failure is raised on all ranks."""
        if self._has_begun:  # not `_is_written`, which only rank 0 sets: all ranks must gather
            return
        self._has_begun = True
        as_first(lambda outcome: state.all_gather(outcome)[0], lambda: self._write(state))

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """Writes the manifest, if the run's folder exists by now."""
        self._write(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Writes the manifest, if it hasn't been possible before."""
        self._write(state)

    @hookimpl
    def training_end(self, state: State) -> None:
        """Adds the end of the run, and the results on the test sets with the weights used."""
        if state.rank != 0:
            return
        manifest = read_json(state.run_dir, RUN_MANIFEST)
        if not manifest:
            return
        reason = state.stop_reason
        manifest["tested"] = state.manifest.get("tested")
        manifest["end"] = {
            "status": status_of(reason),
            "reason": reason,
            **state.clock.moment()._asdict(),
        }
        try:
            _put(manifest, state.run_dir)
        except EventloopError as error:
            if state.settings.on_save_error == "raise":
                raise
            warnings.warn(f"the end of the run isn't recorded: {error}", stacklevel=2)

    @hookimpl
    def exception(self, state: State) -> None:
        """Writes the manifest of a failed run, if its generated folder exists."""
        if not self._is_named:
            self._write(state)

    def _write(self, state: State) -> None:
        if self._is_written or state.rank != 0:
            return
        if not self._is_named:
            if not state.run_dir.is_dir():
                return
            # In a new folder, which has a single writer, an existing manifest is of this run: the command
            # has written it.
            if (state.run_dir / RUN_MANIFEST).exists():
                self._is_written = True
                return
        start = self._start
        script = {} if state.manifest["task"] else {"script": _script()}
        write_manifest(
            {**state.manifest, **script},
            state.run_dir,
            resumed=start.resumed,
            changes=start.changes,
        )
        self._is_written = True
