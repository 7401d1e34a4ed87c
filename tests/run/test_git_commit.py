"""The commit of a folder is read without a program that the folder names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from eventloop.run.git_commit import git_commit

GIT = ["git", "-c", "user.name=x", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
# Each names a program in the configuration of a repository.
PROGRAMS = [
    "core.fsmonitor",
    "core.alternateRefsCommand",
    "core.pager",
    "core.sshCommand",
    "core.editor",
    "core.gitProxy",
    "diff.external",
    "diff.x.textconv",
    "diff.x.command",
    "filter.x.clean",
    "filter.x.smudge",
    "filter.x.process",
    "gpg.program",
    "merge.x.driver",
    "credential.helper",
    "pager.status",
    "uploadpack.packObjectsHook",
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a repository with one committed file; each attribute of it is `x`."""
    folder = tmp_path / "repository"
    run(tmp_path, "init", "-q", str(folder))
    (folder / "file.txt").write_text("text\n")
    (folder / ".gitattributes").write_text("*.txt filter=x diff=x merge=x\n")
    run(folder, "add", ".")
    run(folder, "commit", "-q", "-m", "x")
    git_commit.cache_clear()
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Returns a program that leaves a trace beside itself."""
    path = tmp_path / "program"
    path.write_text(f'#!/bin/sh\necho "$0" >> {tmp_path}/RAN\ncat\n')
    path.chmod(0o755)
    return path


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def touch(path: Path) -> None:
    """Makes git read the file again: a filter is asked only for what isn't as the index says."""
    path.write_text(path.read_text())
    os.utime(path, (1, 1))


@pytest.mark.parametrize("key", PROGRAMS)
def test_no_program_of_the_configuration_runs(
    repository: Path, program: Path, tmp_path: Path, key: str
) -> None:
    """A folder from elsewhere may hold any configuration."""
    run(repository, "config", key, str(program))
    touch(repository / "file.txt")

    commit, _ = git_commit(repository)

    assert commit == run(repository, "rev-parse", "HEAD")
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(
    "hook", ["post-index-change", "fsmonitor-watchman", "reference-transaction"]
)
@pytest.mark.parametrize("where", [".git/hooks", "hooks"])
def test_no_hook_runs(
    repository: Path, program: Path, tmp_path: Path, hook: str, where: str
) -> None:
    """A status that writes the index calls a hook, in any folder that core.hooksPath names."""
    (repository / where).mkdir(exist_ok=True)
    (repository / where / hook).symlink_to(program)
    run(repository, "config", "core.hooksPath", where)
    touch(repository / "file.txt")
    (tmp_path / "RAN").unlink(missing_ok=True)

    git_commit(repository)

    assert not (tmp_path / "RAN").exists()


def test_no_program_of_an_included_file_runs(
    repository: Path, program: Path, tmp_path: Path
) -> None:
    """`include.path` and `includeIf` take a configuration from elsewhere in the folder."""
    (repository / "more").write_text(f"[core]\n\tfsmonitor = {program}\n")
    run(repository, "config", "include.path", "../more")
    run(repository, "config", "includeIf.gitdir:/**.path", "../more")

    git_commit(repository)

    assert not (tmp_path / "RAN").exists()


def test_no_program_of_a_submodule_runs(repository: Path, program: Path, tmp_path: Path) -> None:
    """Git asks each submodule for its status, with the submodule's own configuration."""
    run(tmp_path, "clone", "-q", str(repository), str(tmp_path / "outer"))
    outer = tmp_path / "outer"
    run(outer, "submodule", "--quiet", "add", str(repository), "inner")
    run(outer, "commit", "-q", "-m", "y")
    run(outer / "inner", "config", "core.fsmonitor", str(program))
    touch(outer / "inner" / "file.txt")

    assert git_commit(outer) == (run(outer, "rev-parse", "HEAD"), False)
    assert not (tmp_path / "RAN").exists()


def test_a_missing_object_is_not_fetched(repository: Path, program: Path, tmp_path: Path) -> None:
    """A partial clone fetches missing objects, from a remote that may be a program."""
    tree = run(repository, "rev-parse", "HEAD^{tree}")
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    run(repository, "config", "core.repositoryformatversion", "1")
    run(repository, "config", "extensions.partialClone", "origin")
    run(repository, "config", "remote.origin.promisor", "true")
    run(repository, "config", "remote.origin.url", f"ext::{program}")
    run(repository, "config", "protocol.ext.allow", "always")

    commit, is_dirty = git_commit(repository)

    assert commit == run(repository, "rev-parse", "HEAD")
    assert is_dirty is None
    assert not (tmp_path / "RAN").exists()


def test_a_git_in_the_working_directory_is_not_run(
    repository: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty or relative entry of PATH means the working directory."""
    (repository / "git").symlink_to(program)
    run(repository, "add", ".")
    run(repository, "commit", "-q", "-m", "y")
    head = run(repository, "rev-parse", "HEAD")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", os.environ["PATH"]]))

    assert git_commit(repository) == (head, False)
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("change", ["content", "new file", "staged", "deleted"])
def test_a_change_is_seen(repository: Path, change: str) -> None:
    """The manifest says whether the commit is all of the code."""
    assert git_commit(repository)[1] is False
    git_commit.cache_clear()
    if change == "content":
        (repository / "file.txt").write_text("other\n")
    elif change == "deleted":
        (repository / "file.txt").unlink()
    else:
        (repository / "new.txt").write_text("")
    if change == "staged":
        run(repository, "add", ".")

    assert git_commit(repository)[1] is True


@pytest.mark.parametrize("kind", ["folder in it", "worktree", "sha256", "split index", "no modes"])
def test_a_repository_of_each_kind_is_clean(repository: Path, tmp_path: Path, kind: str) -> None:
    """The index, the objects and what decides about a change lie in other places."""
    folder = repository
    if kind == "folder in it":
        folder = repository / "inner"
        folder.mkdir()
    elif kind == "worktree":
        folder = tmp_path / "tree"
        run(repository, "worktree", "add", "-q", str(folder))
    elif kind == "sha256":
        folder = tmp_path / "long"
        run(tmp_path, "init", "-q", "--object-format=sha256", str(folder))
        run(folder, "commit", "-q", "--allow-empty", "-m", "x")
    elif kind == "split index":
        run(repository, "update-index", "--split-index")
    else:
        run(repository, "config", "core.fileMode", "false")
        (repository / "file.txt").chmod(0o755)

    assert git_commit(folder) == (run(folder, "rev-parse", "HEAD"), False)


def test_ignored_files_are_no_change(repository: Path) -> None:
    """`.git/info/exclude` ignores as .gitignore does."""
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "exclude").write_text("*.log\n")
    (repository / "a.log").write_text("")

    assert git_commit(repository)[1] is False


@pytest.mark.parametrize("kind", ["no repository", "no commit", "no git"])
def test_without_a_commit_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A run needs no git."""
    git_commit.cache_clear()
    if kind == "no commit":
        run(tmp_path, "init", "-q")
    if kind == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))

    assert git_commit(tmp_path) == (None, None)
