"""Tracebacks in a notebook: a wrong setting or shape is a screen, not a book."""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace

import pytest
from torch import nn

from eventloop.errors import SettingError


@pytest.fixture
def in_ipython(monkeypatch):
    """Stands for IPython; the mark is what it reads."""
    module = SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", module)


def shown(error):
    """Returns the functions whose frames IPython shows: those without the mark, and the last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [
        frame.f_code.co_name
        for idx, frame in enumerate(frames)
        if not frame.f_locals.get("__tracebackhide__") or idx == len(frames) - 1
    ]


class Model(nn.Module):
    """Has a layer of another shape than its inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs):
        return self.layer(inputs)


def test_a_wrong_shape_shows_the_caller_the_model_and_the_layer(
    in_ipython, make_trainer, make_task
):
    """The frames of the loop and of torch's calls are all the same each time."""
    trainer = make_trainer(make_task(model=Model))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        trainer.fit()

    assert shown(caught.value) == [
        "test_a_wrong_shape_shows_the_caller_the_model_and_the_layer", "forward", "forward"
    ]  # fmt: skip


def test_outside_of_ipython_every_frame_is_shown(make_trainer, make_task, monkeypatch):
    """A script's traceback goes into reports of bugs."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        make_trainer(make_task(model=Model)).fit()

    assert "_microbatches" in shown(caught.value)


@pytest.mark.parametrize(
    "settings", [{"max_duration": "5 epoch"}, {"seed": "abc"}, {"precision": "bf61"}]
)
def test_a_wrong_setting_has_no_chain_of_causes(settings, make_trainer):
    """The parser's causes say less than the message, in 200 lines."""
    with pytest.raises(SettingError) as caught:
        make_trainer(**settings)

    text = "".join(traceback.format_exception(caught.value))
    assert "direct cause" not in text
    assert "jsonargparse" not in text
