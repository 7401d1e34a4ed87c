"""The form of messages: what happened, who did it, what to do next."""

from __future__ import annotations

import pickle

import pytest
from torch.utils.data import DataLoader, Dataset

from eventloop import errors
from eventloop.distributed.process_ends import summary
from eventloop.errors import (
    EventloopError,
    Note,
    PluginError,
    ReadOnlyStateError,
    SettingError,
    TaskFileError,
    UsageError,
    closest,
    counted,
    notes_of,
    raise_all,
)


def test_a_message_has_a_line_for_each_fact():
    """Aligned, in the order given, with what to do next at the end."""
    error = PluginError("it broke", fix="fix it", plugin="ema (eventloop-ema 0.2.1)", at="x.py:3")

    assert str(error) == (
        "it broke\n  plugin  ema (eventloop-ema 0.2.1)\n  at      x.py:3\n  fix     fix it"
    )
    assert error.what == "it broke"


def test_a_message_may_be_one_line():
    """Facts that nobody knows aren't printed."""
    assert str(EventloopError("it broke")) == "it broke"


def test_a_fact_may_have_a_keyword_for_a_name():
    """Python's own words end in an underscore as parameters."""
    assert str(EventloopError("it broke", from_="run.yaml")) == "it broke\n  from  run.yaml"


@pytest.mark.parametrize(
    ("error", "builtin"), [(SettingError, ValueError), (ReadOnlyStateError, AttributeError)]
)
def test_errors_are_what_python_would_raise(error, builtin):
    """Code that knows nothing of eventloop catches them, too."""
    assert issubclass(error, (EventloopError, builtin))
    assert issubclass(error, builtin)


def test_all_errors_have_one_base():
    """A script may catch whatever eventloop itself raises."""
    own = [one for one in vars(errors).values() if isinstance(one, type)]

    assert own
    assert all(issubclass(one, EventloopError) for one in own if issubclass(one, Exception))


@pytest.mark.parametrize("error", [SettingError, TaskFileError])
def test_wrong_usage_is_known_by_its_class(error):
    """The command's exit status 2 comes from it."""
    assert issubclass(error, UsageError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("before_foward", "; the closest is 'before_forward'"), ("something", ""), ("", "")],
)
def test_the_closest_name_is_given_where_one_is_near(name, hint):
    """A far-fetched guess would mislead."""
    assert closest(name, ["after_forward", "before_forward"]) == hint


def test_no_problem_raises_nothing():
    """Collecting is over, and all is well."""
    assert raise_all([]) is None


def test_the_only_problem_is_raised_as_it_is():
    """With its class, cause and facts."""
    problem = ReadOnlyStateError("it broke")

    with pytest.raises(ReadOnlyStateError) as caught:
        raise_all([problem])

    assert caught.value is problem


def test_several_problems_are_raised_as_one():
    """Mending one a run is slow."""
    with pytest.raises(PluginError) as caught:
        raise_all([PluginError("one", fix="fix it"), PluginError("two")])

    assert str(caught.value) == "2 problems with plugins\n1. one\n  fix  fix it\n2. two"


def test_a_count_agrees_with_its_noun():
    """One is singular, everything else plural."""
    assert [counted(1, "rank"), counted(0, "rank")] == ["1 rank", "0 ranks"]
    assert [counted(1, "batch", "batches"), counted(2000, "batch", "batches")] == [
        "1 batch",
        "2,000 batches",
    ]


def test_a_note_keeps_its_kind_on_its_way_to_another_rank():
    """Ranks send exceptions to each other, and the one that reports asks which plugin raised."""
    error = ValueError("bad")
    error.add_note(Note("raised by plugin ema in batch_end", "origin"))

    received = pickle.loads(pickle.dumps(error))

    assert notes_of(received, "origin") == ["raised by plugin ema in batch_end"]


class Corrupt(Dataset):
    """A data set that can't be read."""

    def __len__(self):
        return 1

    def __getitem__(self, idx):
        raise ValueError("image 33 is corrupt")


def test_the_first_line_has_what_a_worker_of_a_data_loader_raised():
    """Torch's own first line says no more than that a worker raised; the reason is at the end of a traceback."""
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker") as caught:
        next(iter(DataLoader(Corrupt(), num_workers=1)))

    said = summary(caught.value)

    assert said.startswith(
        "ValueError: image 33 is corrupt (Caught ValueError in DataLoader worker"
    )
    assert summary(ValueError("a: b\nValueError: c")) == "ValueError: a: b"


def test_frames_of_cplusplus_come_last():
    """What happened and what to do is read first; torch's errors may have a screen of frames."""
    frames = "Exception raised from load at x.cpp:1 (most recent call first):\nframe #0: f + 0x1"

    error = EventloopError(f"it can't be loaded: bad size\n{frames}", fix="give another")

    assert str(error) == f"it can't be loaded: bad size\n  fix  give another\n{frames}"
    assert error.what == "it can't be loaded: bad size"
