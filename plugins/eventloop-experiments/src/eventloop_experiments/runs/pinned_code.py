"""What all runs of a folder train with: plugins, versions and code, as they were when it began."""

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
    "allow-code-change", "", "go on though plugins, versions or code aren't what they were"
)
_ABSENT = "not there"


class PinnedCode:
    """Compares what a run would train with to what the first one did, before each run.

    Args:
        what: the runs are together: "sweep".
        folder: of all runs.
    """

    def __init__(self, job: Job, what: str, folder: Path) -> None:
        self._job = job
        self._what = what
        self._folder = folder
        self._is_of: tuple[object, ...] = ()
        self._plugins: tuple[Any, ...] = ()
        self._versions: dict[str, str] = {}
        self._then: Mapping[str, Any] = {}
        self._num_begun = 0
        self.problem: EventloopError | None = None

    def begin(self, then: Mapping[str, Any] | None, *, is_allowed: bool) -> Mapping[str, Any]:
        """Returns what is to be stored with the runs.

        Args:
            then: what was returned when they began; None where they begin.
            is_allowed: whether it may differ, and is what counts from now on.

        Raises:
            ResumeError: it differs; with each thing, before and now.
        """
        self._then = self._now() if then is None or is_allowed else then
        if self._refused():
            assert self.problem is not None
            raise self.problem
        return self._then

    def guarded(self, runs: Iterable[R]) -> Iterator[R]:
        """Hands runs on until one would train with something else; then there is a `problem`."""
        waiting = iter(runs)
        while not self._refused() and (run := next(waiting, None)) is not None:
            self._num_begun += 1
            yield run

    def checked(self, outcomes: Iterable[Outcome[R]], folder: RunsFolder) -> Iterator[Outcome[R]]:
        """Hands outcomes on; a run that found other plugins than the first is removed, as if killed.

        One that was begun while something was installed finds it, or not.
        """
        for outcome in outcomes:
            if self._refused() and self._found_others(outcome, folder):
                folder.remove(outcome.run)
                yield replace(
                    outcome, content=None, reason="it found other plugins", was_killed=True
                )
            else:
                yield outcome

    def _found_others(self, outcome: Outcome[R], folder: RunsFolder) -> bool:
        manifest = folder.manifest(outcome.run)
        if manifest is None:  # it failed before it had one
            return outcome.content is None
        pinned = self._then["plugins"]
        return any(
            f"{one['distribution']} {one['version']}" != pinned.get(one["name"], {}).get("version")
            for one in manifest["plugins"]
            if one["source"] == "entry point"
        )

    def _refused(self) -> bool:
        lines = [*_differences(self._then, self._now())]
        if lines:
            begun = f"{counted(self._num_begun, 'run')} since it was started"
            self.problem = ResumeError(
                f"the {self._what} in {self._folder} would go on with other code than it began with",
                changed="\n    ".join(["", *lines]),
                begun=begun,
                fix="put back what has changed and start the same line again; or add "
                f"`--run-dir {self._folder} --allow-code-change` to it, which goes on with the "
                f"change; or begin another {self._what} with another --run-dir",
            )
        return bool(lines)

    def _now(self) -> dict[str, Any]:
        self._look_around()
        core = Path(eventloop.__file__).parent
        folder = _folder_of(self._job)
        return {
            "plugins": {
                one.name: {
                    "role": one.role,
                    "version": f"{one.distribution} {one.version}".strip(),
                    "files": {name: digest[:19] for name, digest in file_digests(one)},
                }
                for one in self._plugins
            },
            "versions": self._versions,
            "eventloop": _digest(sorted(core.rglob("*.py"))),
            "files": {
                name: _digest([folder / name])
                for name in self._then.get("files") or _own_files(folder)
            },
        }

    def _look_around(self) -> None:
        """Reads what is installed, where anything was since it was last read."""
        folders = [Path(one or ".") for one in sys.path]
        state = tuple((one, one.stat().st_mtime_ns) for one in folders if one.exists())
        if state != self._is_of:
            configuration = self._job.configuration
            plugins = Discovery(configuration).chosen(configuration)
            self._plugins = tuple(plugin.found for plugin in plugins if plugin.stage == "chosen")
            names = {one.metadata["Name"] for one in importlib.metadata.distributions()}
            self._versions = {}
            for name in names:
                # What pip left of an uninstalled package, ~ventloop_ema-0.1.0.dist-info, isn't found.
                with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
                    self._versions[name] = importlib.metadata.version(name)
            self._is_of = state


def _folder_of(job: Job) -> Path:
    """Returns the folder of the task's file; of a module, the working directory."""
    label = job.task_file.label
    return Path(label).absolute().parent if label.endswith(".py") else Path.cwd()


def _own_files(folder: Path) -> list[str]:
    """Returns the files of imported modules in the task's folder, the task's file among them."""
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sys.prefix]
    files = {
        Path(file)
        for one in [*sys.modules.values()]
        if (file := getattr(one, "__file__", None)) and Path(file).is_relative_to(folder)
    }
    own = (one for one in files if not any(one.is_relative_to(path) for path in libraries))
    return sorted(one.relative_to(folder).as_posix() for one in own)


def _digest(files: Iterable[Path]) -> str:
    """Returns a digest of what files hold; of one that can't be read, that it isn't there."""
    digest = hashlib.sha256()
    try:
        for one in files:
            digest.update(one.read_bytes())
    except OSError:
        return _ABSENT
    return f"sha256:{digest.hexdigest()[:12]}"


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    named = set()
    for name in sorted(then["plugins"].keys() | now["plugins"].keys()):
        old, new = (one["plugins"].get(name) for one in (then, now))
        before, after = (one["version"] if one else _ABSENT for one in (old, new))
        if before != after:
            named |= {one.partition(" ")[0] for one in (before, after)}
            yield f"plugin {name}: {before} -> {after}"
        elif old is not None and new is not None:
            for line in _changes(old["files"], new["files"]):
                yield f"plugin {name}: {line}"
    versions = {name: now["versions"].get(name, _ABSENT) for name in then["versions"]}
    for name, version in then["versions"].items():
        if versions[name] != version and name not in named:
            yield f"{name}: {version} -> {versions[name]}"
    yield from _changes({"eventloop": then["eventloop"]}, {"eventloop": now["eventloop"]})
    yield from _changes(then["files"], now["files"])


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        before = then.get(name, _ABSENT)
        after = now.get(name, _ABSENT)
        if before != after:
            yield f"{name}: {before} -> {after}"
