"""Trained by transformers' loop and by eventloop's, all that there is to see is equal to the bit."""

from __future__ import annotations

import pytest
import transformers
from hf_cases import CASES, SAVES, Rows, arguments, differing, gpt2, trained

import eventloop_transformers


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_theirs(tmp_path, monkeypatch, name):
    """Weights, optimizer, history, files, the next random numbers; each callback with what it sees."""
    results = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        (tmp_path / kind.__module__).mkdir()
        monkeypatch.chdir(tmp_path / kind.__module__)
        results.append(trained(kind, "out", **CASES[name]))

    assert differing(*results) == []


@pytest.mark.sampled(6)
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


def test_another_seed_would_be_seen(tmp_path, monkeypatch):
    """Control."""
    one = trained(transformers.Trainer, tmp_path / "one")
    other = trained(eventloop_transformers.Trainer, tmp_path / "other", seed=1)

    assert any(one.startswith(".weights") for one in differing(one, other))


def test_a_second_train_begins_again(tmp_path):
    """With the weights of the first, as theirs."""
    results = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        trainer = kind(model=gpt2(), args=arguments(tmp_path), train_dataset=Rows(14))
        trainer.train()
        trainer.train()
        results.append(dict(trainer.model.state_dict()))

    assert differing(*results) == []
