"""Files that libraries create for their owner alone get the permissions of any new file."""

from __future__ import annotations

import os
import stat

import pytest

from eventloop.files.file_modes import apply_umask


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o002, 0o077, 0o027])
def umask(request):
    """The umask of the process, for a test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def private(path):
    path.touch()
    path.chmod(0o600)
    return path


def test_a_file_gets_the_mode_of_a_new_file(umask, tmp_path):
    """Others may be meant to read it, or not: the umask says so."""
    path = private(tmp_path / "model.safetensors")

    apply_umask(str(path))

    assert mode_of(path) == 0o666 & ~umask
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


def test_all_files_of_a_folder_get_it_and_links_stay(tmp_path):
    """What a link leads to may be of another program."""
    outside = private(tmp_path / "outside")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    files = [private(folder / "a"), private(folder / "sub/b")]
    program = private(folder / "run.sh")
    program.chmod(0o700)
    (folder / "link").symlink_to(outside)
    before = os.umask(0o022)
    try:
        apply_umask(folder)
        apply_umask(folder / "link")
    finally:
        os.umask(before)

    assert [mode_of(one) for one in files] == [0o644, 0o644]
    assert mode_of(program) == 0o744
    assert mode_of(outside) == 0o600


def test_what_cannot_be_changed_is_left_alone(tmp_path):
    """The file is written; its permissions are no reason to fail."""
    apply_umask(tmp_path / "missing")
    apply_umask(tmp_path / "missing/folder")

    assert [*tmp_path.iterdir()] == []
