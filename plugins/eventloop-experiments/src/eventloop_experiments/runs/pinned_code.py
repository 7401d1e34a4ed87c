"""The plugins, versions and code that all runs of a folder train with, pinned when the first run began."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eventloop
from eventloop import EventloopError, ResumeError
from eventloop.commands import CommandOption, Discovery, counted, file_digests
from eventloop_experiments.runs.runs_folder import Outcome, R, RunsFolder

if TYPE_CHECKING:
    from eventloop.commands import Job

ALLOW_CODE_CHANGE = CommandOption(
    "allow-code-change", "", "continue although plugins, versions or code have changed"
)
_ABSENT = "not there"


class PinnedCode:
    """Checks before each run that plugins, versions and code are the same as for the first run.

    Args:
        kind: name of the runs as a whole: "sweep".
        folder: folder of all runs.
    """

    def __init__(self, job: Job, kind: str, folder: Path) -> None:
        self._job = job
        self._kind = kind
        self._folder = folder
        self._import_folders: tuple[object, ...] = ()
        self._plugins: tuple[Any, ...] = ()
        self._versions: dict[str, str] = {}
        self._pinned: Mapping[str, Any] = {}
        self._num_begun = 0
        self.problem: EventloopError | None = None

    def begin(self, pinned: Mapping[str, Any] | None, *, is_allowed: bool) -> Mapping[str, Any]:
        """Returns the pinned code, to be stored with the runs.

        Args:
            pinned: the stored result of an earlier call; None when the runs begin.
            is_allowed: whether the code may differ; then the current code is pinned.

        Raises:
            ResumeError: the code differs; lists each change.
        """
        self._pinned = self._current() if pinned is None or is_allowed else pinned
        if self._refused():
            assert self.problem is not None
            raise self.problem
        return self._pinned

    def guarded(self, runs: Iterable[R]) -> Iterator[R]:
        """Yields runs until the code has changed; then `problem` is set."""
        waiting = iter(runs)
        while not self._refused() and (run := next(waiting, None)) is not None:
            self._num_begun += 1
            yield run

    def checked(self, outcomes: Iterable[Outcome[R]], folder: RunsFolder) -> Iterator[Outcome[R]]:
        """Yields outcomes; removes a run that loaded other plugins than the first run, as if it was killed.

        A run that starts while packages are being installed may or may not have loaded the new plugins.
        """
        for outcome in outcomes:
            if self._refused() and self._has_other_plugins(outcome, folder):
                folder.remove(outcome.run)
                yield replace(
                    outcome, content=None, reason="it found other plugins", was_killed=True
                )
            else:
                yield outcome

    def _has_other_plugins(self, outcome: Outcome[R], folder: RunsFolder) -> bool:
        manifest = folder.manifest(outcome.run)
        if manifest is None:  # it failed before it wrote its manifest
            return outcome.content is None
        pinned = self._pinned["plugins"]
        for plugin in manifest["plugins"]:
            pinned_version = pinned.get(plugin["name"], {}).get("version")
            version = f"{plugin['distribution']} {plugin['version']}"
            if plugin["source"] == "entry point" and version != pinned_version:
                return True
        return False

    def _refused(self) -> bool:
        lines = [*_differences(self._pinned, self._current())]
        if lines:
            num_begun = f"{counted(self._num_begun, 'run')} since it was started"
            self.problem = ResumeError(
                f"the {self._kind} in {self._folder} would go on with other code than it began with",
                changed="\n    ".join(["", *lines]),
                begun=num_begun,
                fix="put back what has changed and start the same line again; or add "
                f"`--run-dir {self._folder} --allow-code-change` to it, which goes on with the "
                f"change; or begin another {self._kind} with another --run-dir",
            )
        return bool(lines)

    def _current(self) -> dict[str, Any]:
        self._refresh()
        core = Path(eventloop.__file__).parent
        folder = _folder_of(self._job)
        return {
            "plugins": {
                plugin.name: {
                    "role": plugin.role,
                    "version": f"{plugin.distribution} {plugin.version}".strip(),
                    "files": {name: digest[:19] for name, digest in file_digests(plugin)},
                }
                for plugin in self._plugins
            },
            "versions": self._versions,
            "eventloop": _digest(sorted(core.rglob("*.py"))),
            "files": {
                name: _digest([folder / name])
                for name in self._pinned.get("files") or _own_files(folder)
            },
        }

    def _refresh(self) -> None:
        """Reads the installed packages again, if a folder of `sys.path` has changed since the last call."""
        # A stat of each folder is cheap; reading all distributions takes a noticeable part of a short run.
        folders = [Path(entry or ".") for entry in sys.path]
        state = tuple((folder, folder.stat().st_mtime_ns) for folder in folders if folder.exists())
        if state != self._import_folders:
            configuration = self._job.configuration
            plugins = Discovery(configuration).chosen(configuration)
            self._plugins = tuple(plugin.found for plugin in plugins if plugin.stage == "chosen")
            names = {
                distribution.metadata["Name"] for distribution in importlib.metadata.distributions()
            }
            self._versions = {}
            for name in names:
                # pip may leave remains of an uninstalled package, ~ventloop_ema-0.1.0.dist-info.
                with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
                    self._versions[name] = importlib.metadata.version(name)
            self._import_folders = state


def _folder_of(job: Job) -> Path:
    """Returns the folder of the task's file; for a module, the working directory."""
    label = job.task_file.label
    return Path(label).absolute().parent if label.endswith(".py") else Path.cwd()


def _own_files(folder: Path) -> list[str]:
    """Returns the files of imported modules in the task's folder, the task's file among them."""
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sys.prefix]
    files = set()
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "")
        is_library = any(path.is_relative_to(library) for library in libraries)
        if path.is_relative_to(folder) and path != Path() and not is_library:
            files.add(path.relative_to(folder).as_posix())
    return sorted(files)


def _digest(files: Iterable[Path]) -> str:
    """Returns a digest of the content of files; `_ABSENT` if a file can't be read."""
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.read_bytes())
    except OSError:
        return _ABSENT
    return f"sha256:{digest.hexdigest()[:12]}"


def _differences(pinned: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    reported = set()
    for name in sorted(pinned["plugins"].keys() | current["plugins"].keys()):
        old_plugin = pinned["plugins"].get(name)
        new_plugin = current["plugins"].get(name)
        old_version = old_plugin["version"] if old_plugin else _ABSENT
        new_version = new_plugin["version"] if new_plugin else _ABSENT
        if old_version != new_version:
            # A version is "eventloop-ema 0.2.1": its distribution needs no second line below.
            reported |= {old_version.partition(" ")[0], new_version.partition(" ")[0]}
            yield f"plugin {name}: {old_version} -> {new_version}"
        elif old_plugin is not None and new_plugin is not None:
            for line in _changes(old_plugin["files"], new_plugin["files"]):
                yield f"plugin {name}: {line}"
    for name, version in pinned["versions"].items():
        current_version = current["versions"].get(name, _ABSENT)
        if current_version != version and name not in reported:
            yield f"{name}: {version} -> {current_version}"
    yield from _changes({"eventloop": pinned["eventloop"]}, {"eventloop": current["eventloop"]})
    yield from _changes(pinned["files"], current["files"])


def _changes(pinned: Mapping[str, str], current: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(pinned.keys() | current.keys()):
        old_digest = pinned.get(name, _ABSENT)
        new_digest = current.get(name, _ABSENT)
        if old_digest != new_digest:
            yield f"{name}: {old_digest} -> {new_digest}"
