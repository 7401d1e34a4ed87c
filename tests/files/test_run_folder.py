"""Files that a run writes: what can't be written is told before."""

from __future__ import annotations

import pytest

from eventloop.errors import EventloopError, SettingError
from eventloop.files import run_folder as files
from eventloop.files.run_folder import why_no_file, why_no_folder


@pytest.fixture
def no_rights(monkeypatch):
    """Nothing may be written; root, as whom tests may run, is above the rights of files."""
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)


def test_a_folder_may_be_new_and_is_not_made(clean):
    """Whoever writes the first file makes it."""
    assert why_no_folder(clean / "a" / "b") == ""
    assert why_no_file(clean / "a" / "b" / "model.safetensors") == ""
    assert not (clean / "a").exists()


def test_a_file_is_no_folder(clean):
    """Neither itself nor on the way."""
    (clean / "file").touch()

    assert why_no_folder(clean / "file") == f"{clean / 'file'} is not a folder"
    assert why_no_folder(clean / "file" / "a" / "b") == f"{clean / 'file'} is not a folder"
    assert why_no_file(clean) == "it is a folder"
    assert why_no_file(clean / "file") == ""


def test_rights_are_looked_at(clean, no_rights):
    """Of the folder that is there, and of a file that is to be overwritten."""
    (clean / "file").touch()

    assert why_no_folder(clean / "new") == f"no permission to write in {clean}"
    assert why_no_file(clean / "file") == "no permission to overwrite it"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_unusable_run_dir_is_found_when_the_trainer_is_built(name, make_trainer, clean):
    """The first plugin that writes may do so after an hour."""
    (clean / "file").touch()

    with pytest.raises(SettingError, match=r"run_dir: nothing can be written[\s\S]*run_dir="):
        make_trainer(run_dir=name)


def test_the_folder_that_nobody_chose_is_looked_at_too(make_trainer, clean, no_rights):
    """runs/ is made where the process stands."""
    with pytest.raises(SettingError, match=r"run_dir: nothing can be written in 'runs/"):
        make_trainer()


@pytest.mark.parametrize("name", ["a" * 5_000, "/".join(["a" * 100] * 60), "a\0b"])
def test_a_folder_with_an_impossible_name_is_an_error(name, make_trainer, tmp_path):
    """The operating system says why."""
    with pytest.raises(EventloopError, match=r"fix"):
        make_trainer(run_dir=tmp_path / name)
