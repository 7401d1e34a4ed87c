"""A run's failures reach all plugins, all plugins are closed, and it has the features that it asks for."""

from __future__ import annotations

import pytest
import torch

from eventloop.config.settings import Settings
from eventloop.run.runtime import features_of
from eventloop.training.performance_settings import ChannelsLast, Deterministic, TunedConvolutions
from eventloop.training.precision import Precision


def test_close_comes_once_in_reverse(make_trainer, make_plugin):
    """What was opened last is closed first: callbacks before algorithms, the task last."""
    closed = []

    def closer(name):
        return make_plugin(name, close=lambda: closed.append(name))

    with make_trainer(
        algorithms=[closer("b"), closer("a")], callbacks=[closer("d"), closer("c")]
    ) as trainer:
        pass
    trainer.close()

    assert closed == ["d", "c", "b", "a"]


def test_every_plugin_is_closed_whatever_another_raises(make_trainer, make_plugin):
    """A file that is left open loses its last lines."""
    closed = []

    def fail():
        raise OSError("disk full")

    trainer = make_trainer(
        algorithms=[make_plugin("a", close=lambda: closed.append("a"))],
        callbacks=[make_plugin("b", close=fail), make_plugin("c", close=fail)],
    )

    with pytest.raises(OSError, match="disk full") as caught:
        trainer.close()

    assert closed == ["a"]
    assert "raised by plugin c" in caught.value.__notes__[0]
    assert "then also: OSError: disk full" in "".join(caught.value.__notes__)


def test_an_exception_is_told_to_all_and_keeps_its_type(make_trainer, make_plugin, make_recorder):
    """Whatever a plugin does when it is told, the cause is what the caller sees."""

    def fail(state):
        raise ValueError("cause")

    def fail_again(state, error):
        raise KeyError("consequence")

    recorder = make_recorder(["exception"], name="z")
    bad = make_plugin("bad", batch_end=fail, exception=fail_again)

    with pytest.raises(ValueError, match="cause") as caught:
        make_trainer(algorithms=[bad, recorder]).fit()

    notes = "\n".join(caught.value.__notes__)
    assert recorder.seen == ["exception"]
    assert "raised by plugin bad (Trainer(algorithms=...)) in batch_end, epoch 1, batch 1" in notes
    assert f"correct the plugin's code at {__file__}:" in notes
    assert "then also: KeyError: 'consequence'" in notes


@pytest.mark.parametrize(("note", "said"), [("two layers", ("made: two layers",)), ("", ()),
                                            (None, ())])  # fmt: skip
def test_the_note_of_a_plugin_is_told(note, said, make_trainer, make_plugin):
    """What it did to the model stands in the header."""
    plugin = make_plugin(header_note=lambda: note)

    trainer = make_trainer(algorithms=[plugin], gc_interval=None)

    assert trainer.notes == said


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({"gc_interval": None}, "cpu", []),
        ({"gc_interval": None}, "cuda", [TunedConvolutions, ChannelsLast]),
        ({"gc_interval": None, "deterministic": True}, "cuda", [Deterministic]),
    ],
)
def test_a_run_has_the_features_that_it_asks_for(given, device, expected):
    """What nobody asked for isn't there, and costs nothing."""
    device = torch.device(device)
    precision = Precision("fp32" if device.type == "cpu" else "bf16", device)

    features = features_of(Settings(**given), device, precision)

    assert [type(one) for one in features] == expected
