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
    from eventloop.plugin.registry import Registry
    from eventloop.run.resume import Start
    from eventloop.state import State

RUN_MANIFEST = "manifest.json"
_MOST_OF_A_SCRIPT = 100_000
_OF_A_START = ("started", "resumed", "changes", "command_line", "versions", "git", "device", "end")


def manifest_of(assembly: Registry, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Describes a run in JSON values."""
    commit, is_dirty = git_commit(Path.cwd())
    return {
        "plugins": [
            {
                "name": one.name,
                "role": one.role,
                "distribution": one.distribution,
                "version": one.version,
                "source": one.source,
                "options": json_value(shown_options(one.options)),
                "free": sorted(one.facts.free_options),
                "functions": sorted(
                    name for name in one.options if has_function(one.options[name])
                ),
            }
            for one in assembly.plugins
            if one.role in ("algorithm", "callback")
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
        "owners": {one.action: one.owner.name for one in assembly.decisions()},
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


def write_manifest(
    manifest: Mapping[str, Any],
    run_dir: Path,
    *,
    resumed: str | None = None,
    changes: Sequence[str] = (),
) -> Path:
    """Writes a manifest into the folder of its run, atomically; raises EventloopError.

    It describes the current start; earlier ones are moved to `earlier_starts`.

    Args:
        resumed: the checkpoint that this start resumes from.
        changes: the differences from the run as it began.
    """
    now = {
        **manifest,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed": resumed,
        "changes": list(changes),
        "end": None,
        "earlier_starts": _earlier_starts(read_json(run_dir, RUN_MANIFEST)),
    }
    return _put(now, run_dir)


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


def _earlier_starts(found: Mapping[str, Any]) -> list[Any]:
    """Returns a manifest's entries for its start and earlier ones."""
    if "started" not in found:
        return []
    before = found.get("earlier_starts")
    known = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    one = {key: found.get(key) for key in _OF_A_START}
    return [*known, one]


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """Returns the model's class and its number of parameters, including frozen ones.

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
    """Returns the script that Python runs, with its source; {} without one."""
    if (name := getattr(sys.modules["__main__"], "__file__", None)) is None:
        return {}
    try:
        data = Path(name).read_bytes()
    except OSError:
        return {}
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    is_short = len(data) <= _MOST_OF_A_SCRIPT
    digest = hashlib.sha256(data).hexdigest()
    return {"path": name, "digest": f"sha256:{digest}", "source": text if is_short else ""}


def announce_off(state: State, way_in: str) -> None:
    """Writes a line with the algorithms that autoload="callbacks" keeps off; `way_in` lets one in."""
    names = sorted(one["name"] for one in state.manifest["off"] if one["kind"] == "autoload")
    if names and state.rank == 0 and state.settings.autoload == "callbacks":
        sys.stderr.write(f"eventloop: off, unless passed in {way_in}: {', '.join(names)}\n")


class RunFile:
    """Writes `manifest.json` into the folder of a run; a plugin of the core.

    A folder that the user named gets it when the first fit begins, after the lock was acquired; a
    generated folder as soon as it exists, as a run without files creates none.
    """

    __slots__ = ("_has_begun", "_is_named", "_is_written", "_start")

    def __init__(self, start: Start, *, is_named: bool) -> None:
        self._start = start
        self._is_named = is_named
        self._is_written = False
        self._has_begun = False

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Writes it once; a failure is raised on all ranks."""
        if self._has_begun:  # rank 0 alone knows whether it is written
            return
        self._has_begun = True
        as_first(lambda one: state.all_gather(one)[0], lambda: self._write(state))

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """Writes it, if the folder exists by now."""
        self._write(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Writes it, if that hasn't been possible before."""
        self._write(state)

    @hookimpl
    def training_end(self, state: State) -> None:
        """Adds how the run ended, and the results on the test sets with the weights used."""
        if state.rank == 0 and (found := read_json(state.run_dir, RUN_MANIFEST)):
            reason = state.stop_reason
            now = {"tested": state.manifest.get("tested")}
            end = {"status": status_of(reason), "reason": reason, **state.clock.moment()._asdict()}
            try:
                _put({**found, **now, "end": end}, state.run_dir)
            except EventloopError as error:
                if state.settings.on_save_error == "raise":
                    raise
                warnings.warn(f"how the run ended isn't noted: {error}", stacklevel=2)

    @hookimpl
    def exception(self, state: State) -> None:
        """Writes it, if the folder exists and no command has."""
        if not self._is_named:
            self._write(state)

    def _write(self, state: State) -> None:
        if self._is_written or state.rank != 0:
            return
        if not self._is_named:
            if not state.run_dir.is_dir():
                return
            # A command has written it into a folder that is new and has one writer.
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
