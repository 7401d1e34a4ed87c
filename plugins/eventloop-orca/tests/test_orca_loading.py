"""Callbacks by name, and what is said where there is none."""

import pytest

from eventloop import PluginError
from eventloop_orca import Callback, MainCallback, Orca
from eventloop_orca.loading import callback_of

FILE = """
from eventloop_orca import Callback

class Clip(Callback):
    pass

class Needs(Callback):
    def __init__(self, limit):
        self.limit = limit

ready = Needs(2)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_file_names_a_class_or_an_instance(file, monkeypatch):
    """Relative to where the process was started, as the shell completes it."""
    monkeypatch.chdir(file.parent)

    assert type(callback_of("./mine.py:Clip")).__name__ == "Clip"
    assert callback_of("mine.py:ready").limit == 2
    assert type(callback_of(f"{file}:Clip")) is type(callback_of("mine.py:Clip"))


def test_a_module_and_objects_are_taken_too():
    """Packages of callbacks go on working; in Python nobody wants to write paths."""
    instance = Callback()

    assert type(callback_of("eventloop_orca.callbacks:MainCallback")) is MainCallback
    assert callback_of(instance) is instance
    assert isinstance(callback_of(Callback), Callback)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("Clip", "is not a path of a class"),
        (":Clip", "is not a path of a class"),
        ("nothing_here:Clip", "can't be imported: No module named 'nothing_here'"),
        ("eventloop_orca:Callbak", "has no 'Callbak'; the closest is 'Callback'"),
        ("{folder}/other.py:Clip", "there is no file"),
        ("{folder}/mine.py:Clap", "has no 'Clap'; the closest is 'Clip'"),
        ("{folder}/mine.py:Needs", "can't be built without arguments.*limit"),
    ],
)
def test_a_wrong_path_is_named_with_a_way_out(path, says, file):
    """Before anything is built."""
    with pytest.raises(PluginError, match=rf"{says}[\s\S]*fix "):
        Orca(callbacks=[path.format(folder=file.parent)])


@pytest.mark.parametrize(
    ("callbacks", "error", "says"),
    [([], ValueError, "callbacks=\\[\\] has none"), (3, TypeError, "callbacks=3 is not a list")],
)
def test_no_callbacks_are_refused(callbacks, error, says):
    """An adapter of nothing would have no effect."""
    with pytest.raises(error, match=says):
        Orca(callbacks=callbacks)


def test_one_path_needs_no_list():
    """As it is typed on the command line."""
    assert Orca(callbacks="eventloop_orca:Callback").callbacks == "eventloop_orca:Callback"
