"""Plugins of eventloop's take part if they are named, and say so where they have no place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from hf_cases import Rows, arguments, differing, gpt2, trained

import eventloop_transformers
from eventloop import PluginError, SettingError
from eventloop_agc import Agc
from eventloop_ema import Ema
from eventloop_jsonl import Jsonl
from eventloop_muon import Muon
from eventloop_sam import Sam
from eventloop_swa import Swa
from eventloop_throughput import Throughput
from eventloop_transformers import on_eventloop

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def with_plugins(folder: Path, plugins: Sequence[object], **more: Any) -> dict[str, Any]:
    kind = on_eventloop(transformers.Trainer, plugins=plugins, run_dir=folder / "run")
    return trained(kind, folder / "out", **EVALUATED, **more)


def theirs(folder: Path, **more: Any) -> dict[str, Any]:
    return trained(transformers.Trainer, folder / "theirs", **EVALUATED, **more)


def losses(result: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in result["history"] if name in row]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "average", [Ema(half_life="3ba"), Swa(start="2ba", interval="2ba")], ids=["ema", "swa"]
)
def test_an_average_is_evaluated_and_training_goes_on_without_it(tmp_path, average):
    """The evaluation is the trainer's own, with other weights."""
    plain = theirs(tmp_path)

    found = with_plugins(tmp_path, [average])

    assert differing(plain["weights"], found["weights"]) == []
    assert losses(plain, "loss") == losses(found, "loss")
    assert losses(plain, "eval_loss")[-1] != losses(found, "eval_loss")[-1]


def test_after_training_the_average_is_evaluated_and_exported(tmp_path):
    """`evaluate` after `train` refers to the weights that the last evaluation saw."""
    kind = on_eventloop(transformers.Trainer, plugins=[Ema(half_life="3ba")])
    args = arguments(tmp_path, **EVALUATED)
    trainer = kind(model=gpt2(), args=args, train_dataset=Rows(14), eval_dataset=Rows(6))
    trainer.train()
    averaged = trainer.evaluate()["eval_loss"]
    path = trainer.eventloop.export(tmp_path / "average.safetensors")
    trainer.eventloop.close()

    alone = transformers.Trainer(model=gpt2(), args=args, eval_dataset=Rows(6))
    trainer.eventloop.load_weights(path)
    alone.model.load_state_dict(trainer.model.state_dict())

    last = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row][-1]
    assert averaged == last == alone.evaluate()["eval_loss"]


@pytest.mark.nightly
@pytest.mark.parametrize("accumulated", [1, 4])
def test_sam_takes_its_second_gradient_by_the_trainers_step(tmp_path, accumulated):
    """With rho near 0 it is the first one, so that the training is the plain one's."""
    plain = theirs(tmp_path, gradient_accumulation_steps=accumulated)

    same = with_plugins(
        tmp_path / "same", [Sam(rho=1e-30)], gradient_accumulation_steps=accumulated
    )
    other = with_plugins(
        tmp_path / "other", [Sam(rho=0.5)], gradient_accumulation_steps=accumulated
    )

    assert differing(plain["history"], same["history"]) == []
    assert differing(plain["history"], other["history"]) != []


@pytest.mark.nightly
def test_agc_clips_instead_of_the_trainer(tmp_path):
    """It is refused as long as the trainer would clip, too, which it does unless it is told."""
    with pytest.raises(PluginError, match=r"so that max_grad_norm=1\.0 has no effect"):
        with_plugins(tmp_path / "both", [Agc()])

    plain = theirs(tmp_path, max_grad_norm=0.0)
    found = with_plugins(tmp_path, [Agc(clip=0.001)], max_grad_norm=0.0)

    assert differing(plain["weights"], found["weights"]) != []


REASONS = {
    "muon": "muon doesn't suit this trainer: it implements build_optimizers, but the trainer has made",
    "checkpointing": "checkpointing doesn't suit this trainer: it implements init",
    "label-smoothing": "label-smoothing was asked for, but doesn't suit this task",
    "seq-length-warmup": "seq-length-warmup was asked for, but doesn't suit this task",
    "nope": "no plugin is named 'nope'",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plugin", REASONS)
def test_a_plugin_without_a_place_says_so(tmp_path, plugin, installed):
    """Forward pass and loss are in `training_step`; model, optimizer and data are there already."""
    with pytest.raises(PluginError, match=REASONS[plugin]):
        with_plugins(tmp_path, [Muon() if plugin == "muon" else plugin])


def test_an_average_and_the_best_weights_are_refused(tmp_path):
    """The best file would have other weights than those that gave its metric."""
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}

    with pytest.raises(PluginError, match="loads weights without it"):
        with_plugins(tmp_path, [Ema()], **best)


@pytest.mark.nightly
def test_loggers_get_what_the_trainer_logs(tmp_path):
    """Beside what they have of any run."""
    kind = on_eventloop(
        transformers.Trainer, watchers=[Jsonl(), Throughput()], run_dir=tmp_path / "run"
    )
    trained(kind, tmp_path / "out", **EVALUATED)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    names = {json.loads(line)["name"] for line in lines}
    assert {"loss", "grad_norm", "eval_loss", "train/loss", "throughput/samples_per_s"} <= names


def test_installed_algorithms_stay_off_and_one_line_says_so(tmp_path, capsys, installed):
    """The weights are theirs, whatever is installed."""
    trained(eventloop_transformers.Trainer, tmp_path / "out")

    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("eventloop")]
    assert (
        line
        == "eventloop: off, unless named in plugins=[...]: checkpointing, label-smoothing, seq-length-warmup"
    )


@pytest.mark.parametrize("name", ["max_duration", "precision", "resume", "autoload"])
def test_settings_that_are_training_arguments_are_refused(name):
    """They would say something else than the trainer does."""
    with pytest.raises(SettingError, match=f"^{name} is a setting of eventloop's"):
        on_eventloop(transformers.Trainer, **{name: "auto"})


def test_a_trainer_with_a_loop_of_its_own_is_refused():
    """Its loop would not run."""

    class Own(transformers.Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            """Trains otherwise."""

    with pytest.raises(TypeError, match="has a loop of its own, _inner_training_loop"):
        on_eventloop(Own)


@pytest.mark.parametrize("strategy", ["FSDP", "DeepSpeed"])
def test_strategies_are_refused_by_name(tmp_path, strategy):
    """At the start, not where they would fail."""
    trainer = eventloop_transformers.Trainer(
        model=gpt2(), args=arguments(tmp_path), train_dataset=Rows(6)
    )
    setattr(trainer, f"is_{strategy.lower()}_enabled", True)

    with pytest.raises(SettingError, match=f"{strategy} isn't run on eventloop's loop"):
        trainer.train()
