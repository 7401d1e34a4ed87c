"""Trained by transformers' loop and by eventloop's, all that there is to see is equal to the bit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from hf_cases import CASES, SAVES, Rows, arguments, differing, gpt2, trained
from torch import nn
from torch.nn.functional import mse_loss
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

import eventloop_transformers


@pytest.mark.sampled(36)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_theirs(tmp_path, monkeypatch, name):
    """Weights, optimizer, history, files, the next random numbers; each callback with what it sees."""
    results = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        (tmp_path / kind.__module__).mkdir()
        monkeypatch.chdir(tmp_path / kind.__module__)
        results.append(trained(kind, "out", **CASES[name]))

    assert differing(*results) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more", [{}, {"gradient_accumulation_steps": 2}, {"ignore_data_skip": True}], ids=str
)
@pytest.mark.parametrize("resume", [True, "out/checkpoint-3", "out/checkpoint-7"], ids=str)
def test_it_resumes_from_a_checkpoint_of_transformers_as_theirs(
    tmp_path, monkeypatch, more, resume
):
    """In mid-epoch, at the end of an epoch; with the data skipped and not."""
    given = {**SAVES, "eval_strategy": "no", **more, "save_steps": 1, "num_train_epochs": 3}
    results = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        (tmp_path / kind.__module__).mkdir()
        monkeypatch.chdir(tmp_path / kind.__module__)
        trained(transformers.Trainer, "out", **given, callbacks=(), max_steps=8)
        results.append(trained(kind, "out", **given, resume=resume))

    assert differing(*results) == []


@pytest.mark.nightly
@pytest.mark.parametrize("resume", [None, True], ids=str)
def test_it_logs_the_lines_of_theirs(tmp_path, monkeypatch, resume):
    """How much is trained, from where on, and that it is over, at the level that `log_level` asks for."""
    found = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        (tmp_path / kind.__module__).mkdir()
        monkeypatch.chdir(tmp_path / kind.__module__)
        given = {**SAVES, "gradient_accumulation_steps": 2, "log_level": "info"}
        trained(transformers.Trainer, "out", **given, max_steps=4)
        with CaptureLogger(logging.get_logger("transformers")) as captured:
            trained(kind, "out", **given, resume=resume)
        found.append(captured.out)

    assert "Num update steps per epoch = 4" in found[0]
    assert ("Fast-forwarding the dataloader past" in found[0]) == bool(resume)
    assert found[1] == found[0]


class Broadcasts(nn.Module):
    """Compares outputs (B, 1) with targets (B,), of which torch warns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 1)

    def forward(self, input_ids, labels, **kwargs):
        return {"loss": mse_loss(self.embedding(input_ids).mean(1), labels.float().mean(1))}


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_broadcasts_trains_as_theirs(tmp_path):
    """Torch warns, and no more; a loop of eventloop's without a bridge has it raise."""
    torch.manual_seed(0)
    model = Broadcasts()
    results = [
        trained(kind, tmp_path, model=lambda: copy.deepcopy(model))
        for kind in (transformers.Trainer, eventloop_transformers.Trainer)
    ]

    assert differing(*results) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [transformers.Trainer, eventloop_transformers.Trainer])
@pytest.mark.parametrize("action", ["ignore", "default", "error"])
def test_filters_of_the_users_hold_where_a_loss_broadcasts(tmp_path, kind, action):
    """Those set before, and those that a callback sets."""

    class Filters(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            warnings.filterwarnings("ignore", "a filter of the user's")

    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings(action, "Using a target size")
        try:
            trained(kind, tmp_path, model=Broadcasts, callbacks=(Filters,))
        except UserWarning as error:
            raised = str(error)
        filters = [str(one[1] and one[1].pattern) for one in warnings.filters]

    has_warned = any("Using a target size" in str(one.message) for one in caught)
    assert has_warned == (action == "default")
    assert ("Using a target size" in raised) == (action == "error")
    assert "a filter of the user's" in filters
    assert filters.count("Using a target size") == 1


@pytest.mark.nightly
def test_another_seed_would_be_seen(tmp_path, monkeypatch):
    """Control."""
    one = trained(transformers.Trainer, tmp_path / "one")
    other = trained(eventloop_transformers.Trainer, tmp_path / "other", seed=1)

    assert any(one.startswith(".weights") for one in differing(one, other))


@pytest.mark.nightly
def test_a_second_train_begins_again(tmp_path):
    """With the weights of the first, as theirs."""
    results = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        trainer = kind(model=gpt2(), args=arguments(tmp_path), train_dataset=Rows(14))
        trainer.train()
        trainer.train()
        results.append(dict(trainer.model.state_dict()))

    assert differing(*results) == []
