"""Reads the commit of a folder without running any program that its git configuration names.

`git status` runs programs that a repository's own configuration names: `core.fsmonitor`, hooks,
filters that `.gitattributes` selects, `ext::` remotes of a partial clone, and the same again for
each submodule. The folder may not be trustworthy. So `git status` runs in an empty git directory,
without configuration, hooks or remotes, that refers to the index and the objects of the repository.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_TIMEOUT_S = 5
# Programs that the user's own configuration may name relative to the working directory.
_WITHOUT_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
# Keys that decide which files count as changed, and whose values can't name a program.
_HARMLESS_KEYS = frozenset(
    {
        "core.autocrlf",
        "core.checkstat",
        "core.eol",
        "core.filemode",
        "core.ignorecase",
        "core.precomposeunicode",
        "core.sparsecheckout",
        "core.sparsecheckoutcone",
        "core.symlinks",
        "core.trustctime",
    }
)
_INFO_FILES = ("exclude", "attributes")
_MAX_INFO_BYTES = 1_000_000
_SHA256_DIGITS = 64
_SHA256_CONFIG = """\
[core]
\trepositoryformatversion = 1
[extensions]
\tobjectformat = sha256
"""


@functools.cache
def git_commit(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the checked-out commit, and whether it has uncommitted changes; None without git.

    Changes within submodules don't count. A file to which the repository's own configuration applies
    a filter counts as changed once it has been rewritten, as the filter isn't run.
    """
    git = _git_program()
    if git is None:
        return None, None
    try:
        # `rev-parse` only reads refs. It also checks the owner of the repository (safe.directory), which
        # `git status` with GIT_DIR doesn't.
        lines = _run([git, *_WITHOUT_PROGRAMS, "rev-parse", *_QUERIES], folder, {}).splitlines()
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit, *paths = lines
    try:
        return commit, _is_dirty(git, commit, *(folder / path for path in paths))
    except (OSError, TypeError, ValueError, subprocess.SubprocessError):
        return commit, None


_QUERIES = ("HEAD", "--git-dir", "--git-common-dir", "--show-toplevel")


def _git_program() -> str | None:
    """Returns the path of git, or None; ignores entries of PATH relative to the working directory."""
    entries = [entry for entry in os.get_exec_path() if Path(entry).is_absolute()]
    path = shutil.which("git", path=os.pathsep.join(entries))
    return path if path and Path(path).is_absolute() else None


def _is_dirty(git: str, commit: str, git_dir: Path, common_dir: Path, top: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="eventloop-git-") as name:
        empty_git_dir = Path(name)
        (empty_git_dir / "refs").mkdir()
        (empty_git_dir / "info").mkdir()
        (empty_git_dir / "HEAD").write_text(f"{commit}\n")
        if len(commit) == _SHA256_DIGITS:
            (empty_git_dir / "config").write_text(_SHA256_CONFIG)
        variables = {
            "GIT_DIR": str(empty_git_dir),
            "GIT_WORK_TREE": str(top),
            "GIT_INDEX_FILE": str(git_dir / "index"),
            "GIT_OBJECT_DIRECTORY": str(common_dir / "objects"),
            "GIT_OPTIONAL_LOCKS": "0",  # writing the index would call a hook
            "GIT_NO_LAZY_FETCH": "1",
        }
        for info in _INFO_FILES:
            original = common_dir / "info" / info
            if original.is_file() and original.stat().st_size <= _MAX_INFO_BYTES:
                shutil.copyfile(original, empty_git_dir / "info" / info)
        for shared_index in git_dir.glob("sharedindex.*"):  # an index can refer to a second file
            (empty_git_dir / shared_index.name).symlink_to(shared_index)
        options = _harmless_options(git, common_dir / "config", variables)
        arguments = ["status", "--porcelain", "--ignore-submodules=dirty"]
        return bool(_run([git, *_WITHOUT_PROGRAMS, *options, *arguments], top, variables))


def _harmless_options(git: str, config: Path, variables: Mapping[str, str]) -> list[str]:
    """Returns the settings of a repository that name no program, as options of git."""
    listing = [git, "config", "--file", str(config), "--no-includes", "--null", "--list"]
    options = []
    for entry in _run(listing, config.parent, variables).split("\0"):
        key, _, value = entry.partition("\n")
        if key in _HARMLESS_KEYS:
            options += ["-c", f"{key}={value}"]
    return options


def _run(command: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    )
    return result.stdout
