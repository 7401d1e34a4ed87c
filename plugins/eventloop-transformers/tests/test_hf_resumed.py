"""A run that dies and is started again ends as transformers' own would have in one go, to the bit."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from hf_cases import SAVES, Noisy, Rows, Stream, arguments, differing, gpt2, trained

import eventloop_transformers
from eventloop import SettingError
from eventloop_transformers import on_eventloop
from eventloop_transformers.plain_attributes import Attributes

CASES: dict[str, dict[str, Any]] = {
    "saving and evaluation": {**SAVES, "save_total_limit": 2, "save_steps": 4},
    "the best": {**SAVES, "save_total_limit": 2, "load_best_model_at_end": True},
    "early stopping": {
        **SAVES, "load_best_model_at_end": True, "learning_rate": 0.1,
        "callbacks": (lambda: transformers.EarlyStoppingCallback(2),),
    },
    "accumulation": {"gradient_accumulation_steps": 4, "include_num_input_tokens_seen": "all"},
    "data that draw": {"data": lambda: Noisy(14), "logging_steps": 5},
    "a stream": {"data": lambda: Stream(14), "max_steps": 20, "gradient_accumulation_steps": 2},
    "fp16": {"fp16": True, "max_grad_norm": 0.5},
    "workers": {"dataloader_num_workers": 2, "data": lambda: Rows(14)},
}  # fmt: skip


class Killed(BaseException):
    """The end of a process, as far as this one can have it."""


def dying(kind: type, at: int) -> type:
    """Returns a trainer that dies at a call of `training_step`; 0 for never."""
    calls = 0

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Killed
        return kind.training_step(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"training_step": training_step})


def resumed(folder: Path, deaths: tuple[int, ...], interval: str, **case: Any) -> dict[str, Any]:
    """Trains in processes that die, one after the other, and in one that doesn't."""
    kind = on_eventloop(transformers.Trainer, run_dir=folder / "run", checkpoint_interval=interval)
    for at in (*deaths, 0):
        with suppress(Killed):
            return trained(dying(kind, at), "out", **case)
    raise AssertionError("the last process doesn't die")


def in_one_go(folder: Path, monkeypatch: pytest.MonkeyPatch, **case: Any) -> dict[str, Any]:
    (folder / "theirs").mkdir()
    monkeypatch.chdir(folder / "theirs")
    whole = trained(transformers.Trainer, "out", **case)
    (folder / "ours").mkdir()
    monkeypatch.chdir(folder / "ours")
    return whole


def without_calls(result: dict[str, Any]) -> dict[str, Any]:
    """A process that goes on calls what begins a training once more."""
    return {**result, "calls": result["calls"][-1]}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("deaths", "interval"), [((5, 3, 12), "1ba"), ((10, 9, 2), "3ba")], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_to_the_bits_of_one_go(tmp_path, monkeypatch, name, deaths, interval):
    """Weights, optimizer, history, the state with its counts, files, the next random numbers."""
    case = {"num_train_epochs": 3, **CASES[name]}
    whole = in_one_go(tmp_path, monkeypatch, **case)

    found = resumed(tmp_path, deaths, interval, **case)

    assert differing(without_calls(whole), without_calls(found)) == []


def test_an_epoch_that_is_resumed_at_its_end_counts_no_batch(tmp_path, monkeypatch):
    """The last step, whose process dies too, would be left out."""
    case = {"num_train_epochs": 3}
    whole = in_one_go(tmp_path, monkeypatch, **case)
    num_steps = whole["output"][0]

    found = resumed(tmp_path, (num_steps // 3 + 1, num_steps * 2 // 3), "1ba", **case)

    assert differing(without_calls(whole), without_calls(found)) == []


@pytest.mark.nightly
def test_without_what_is_kept_it_would_end_elsewhere(tmp_path, monkeypatch):
    """Control: the losses that aren't logged yet are forgotten."""
    case = {"logging_steps": 5}
    whole = in_one_go(tmp_path, monkeypatch, **case)
    monkeypatch.setattr(Attributes, "put", lambda *_: None)

    found = resumed(tmp_path, (8,), "1ba", **case)

    assert any("loss" in one for one in differing(whole["history"], found["history"]))


@pytest.mark.nightly
def test_a_run_that_is_over_is_over_when_it_is_started_again(tmp_path, monkeypatch):
    """It returns what it returned."""
    whole = in_one_go(tmp_path, monkeypatch)
    resumed(tmp_path, (), "3ba")

    again = resumed(tmp_path, (), "3ba")

    unlike = {"calls": 0, "random": 0}  # nothing was drawn
    assert differing({**whole, **unlike}, {**again, **unlike}) == []


@pytest.mark.nightly
def test_without_a_run_dir_nothing_goes_on(tmp_path):
    """It is asked for, as by transformers' `resume_from_checkpoint`."""
    first = trained(eventloop_transformers.Trainer, tmp_path / "out", **SAVES)

    second = trained(eventloop_transformers.Trainer, tmp_path / "out", **SAVES)

    assert differing(first["history"], second["history"]) == []
    assert not Path("runs").exists()


@pytest.mark.nightly
def test_checkpoints_of_later_steps_are_written_again_and_others_stay(tmp_path, monkeypatch):
    """A torn one, and one of a run before."""
    monkeypatch.chdir(tmp_path)
    Path("out/checkpoint-999").mkdir(parents=True)
    case = {**SAVES, "eval_strategy": "no"}
    kind = on_eventloop(transformers.Trainer, run_dir=tmp_path / "run", checkpoint_interval="2ba")
    with pytest.raises(Killed):
        trained(dying(kind, 7), "out", **case)
    Path("out/checkpoint-7").mkdir()

    trained(kind, "out", **case)

    names = sorted(one.name for one in Path("out").iterdir())
    assert names == ["checkpoint-12", "checkpoint-14", *names[2:]]
    assert set(names) == {f"checkpoint-{one}" for one in (3, 6, 9, 12, 14, 999)}


def test_a_run_dir_is_for_one_train(tmp_path):
    """A second would take the first for its own."""
    kind = on_eventloop(transformers.Trainer, run_dir=tmp_path / "run")
    trainer = kind(model=gpt2(), args=arguments(tmp_path / "out"), train_dataset=Rows(6))
    trainer.train()

    with pytest.raises(SettingError, match="has trained already"):
        trainer.train()


def test_a_trainers_own_save_is_a_checkpoint_of_eventloops_too(tmp_path):
    """With `save_steps` alone a run goes on from where its last folder says."""
    kind = on_eventloop(transformers.Trainer, run_dir=tmp_path / "run", checkpoint_keep=None)
    trained(kind, tmp_path / "out", save_strategy="steps", save_steps=5)

    names = sorted(one.name for one in (tmp_path / "run" / "checkpoints").iterdir())
    assert [int(one.rpartition("ba")[2]) for one in names] == [0, 5, 7, 10, 14]
