"""Reward models: as TRL trains them, resumed, on ranks, beside other plugins, from the command."""

from __future__ import annotations

import importlib.util
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from reward_cases import CHATS, MARGINS, PAIRS, llama, reward_task, theirs, trained, with_adapters
from run_cases import Ends
from sft_cases import TARGETS, tokenizer
from sft_cases import llama as language_model

import eventloop_llm.reward
from eventloop import TaskError
from eventloop.cli import main
from eventloop_check import Check
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_export import Export
from eventloop_fsdp import Fsdp
from eventloop_jsonl import Jsonl
from eventloop_llm.lora import Lora
from eventloop_muon import Muon
from eventloop_testing import Dies, KilledRuns, isolated_trainer, pretend_device, run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "chats.py"
STRATEGIES = {"ddp": list, "fsdp": lambda: [Fsdp()]}
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
# What is compared with TRL: rows, our options, TRL's.
CASES = {
    "texts": (PAIRS, {}, {}),
    "chats": (CHATS, {}, {}),
    "margins": (MARGINS, {}, {}),
    "centered": (PAIRS, {"center_weight": 0.05}, {"center_rewards_coefficient": 0.05}),
}
MODELS = {"full": llama, "LoRA": with_adapters}
MICROBATCHES = {
    "whole": {},
    "1": {"microbatch_size": 1},
    "3": {"microbatch_size": 3},
    "3, sliced": {"settings": {"microbatch_size": 3}},
}


def lora():
    return Lora(r=2, target_modules=TARGETS, modules_to_save=["score"], task_type="SEQ_CLS")


KINDS = {
    "plain": (list, {}),
    "parts": (list, {"microbatch_size": 2, "center_weight": 0.01}),
    "margins": (list, {"rows": MARGINS}),
    "all at once": (
        lambda: [lora(), Ema(half_life="3ba"), Muon(), Checkpointing()], {"microbatch_size": 1},
    ),
}  # fmt: skip


def require_equal(actual, expected):
    for mine, trls in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, trls, rtol=0, atol=1e-6)


def fit(folder, batch, kind, *more):
    """Trains two epochs with evaluations; may die."""
    plugins, options = KINDS[kind]
    settings = {"checkpoint_interval": "1ba", "callbacks": [Jsonl()]}
    options = {"eval_data": PAIRS[:4]} | options
    return trained(folder, *plugins(), *more, Dies(batch), settings=settings, **options)


def test_the_loss_is_that_of_the_papers():
    """A margin asks for more, a sum that isn't 0 costs."""
    chosen, rejected = torch.tensor([1.0, -0.5]), torch.tensor([0.2, 0.3])

    actual = eventloop_llm.reward.reward_losses(chosen, rejected, torch.tensor([0.0, 0.5]), 0.1)

    expected = [
        math.log(1 + math.exp(-0.8)) + 0.1 * 1.2**2,
        math.log(1 + math.exp(1.3)) + 0.1 * 0.04,
    ]
    torch.testing.assert_close(actual.tolist(), expected, rtol=1e-6, atol=0)


@needs_trl
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_it_ends_with_the_losses_and_weights_of_trl(tmp_path, case, model):
    """However a batch is cut."""
    rows, options, their_options = CASES[case]
    expected = theirs(rows, MODELS[model], **their_options)

    for name, given in MICROBATCHES.items():
        given = {"rows": rows, "model": MODELS[model], "shuffle": False} | options | given
        require_equal(trained(tmp_path / name, **given), expected)


@pytest.mark.nightly
@needs_trl
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_end_with_the_losses_and_weights_of_two_of_trl(tmp_path, model):
    """Whole and sharded, with microbatches of 1 and 3."""
    given = {"per_device_train_batch_size": 3, "ddp_backend": "gloo"}
    expected = run_ranks(lambda: theirs(PAIRS, MODELS[model], **given))[0]

    for name, strategy in STRATEGIES.items():
        for size in (1, 3):
            asked = {"batch_size": 3, "microbatch_size": size, "shuffle": False}
            folder, make = tmp_path / f"{name}{size}", MODELS[model]
            found = run_ranks(lambda: trained(folder, *strategy(), model=make, **asked))[0]
            require_equal(found, expected)


@needs_trl
def test_a_margin_is_seen(tmp_path):
    """Control: without it the weights are others."""
    actual = trained(tmp_path, rows=PAIRS, shuffle=False)

    with pytest.raises(AssertionError):
        require_equal(actual, theirs(MARGINS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_an_accelerator_has_the_bits_of_the_cpu(tmp_path, kind):
    """Weights and losses; random numbers are drawn as on the host."""
    plugins, options = KINDS[kind]

    expected = trained(tmp_path / "cpu", *plugins(), settings={"device": "cpu"}, **options)
    with pretend_device(draws_from_host=True):
        there = {"device": "pretend"}
        actual = trained(tmp_path / "there", *plugins(), settings=there, **options)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_with_the_bits_of_one_in_one_go(tmp_path, kind):
    """In mid-epoch, at its end and in the next one."""
    runs = KilledRuns(fit, tmp_path / "one-go", kind)

    assert runs.differing(tmp_path / "killed", 1, 2, 3) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_go_on_with_the_same_bits(tmp_path, strategy):
    """Whole and sharded."""

    def train(folder, *more):
        try:
            return fit(tmp_path / folder, None, "parts", *STRATEGIES[strategy](), *more)[0]
        except EOFError:
            return None

    expected = run_ranks(lambda: train("one"))
    assert run_ranks(lambda: train("two", Ends(1))) == [None, None]

    actual = run_ranks(lambda: train("two", Ends(None)))

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_step_reads_nothing_from_the_device(tmp_path):
    """The control is in test_sft.py."""
    check = Check()
    trained(tmp_path, settings={"observers": [check]})

    assert [str(one) for one in check.findings if one.kind == "read"] == []


def test_transformers_loads_what_is_exported_with_the_same_rewards(tmp_path):
    """Also of rows that are padded."""
    from transformers import AutoModelForSequenceClassification

    task = reward_task(eval_data=PAIRS[:4])
    with isolated_trainer(tmp_path, task, algorithms=[Export()], max_duration="1ep") as trainer:
        trainer.fit()
        (outputs,) = trainer.predict(trainer.state.eval_dataloaders["eval"])
        trainer.export(tmp_path / "reward")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()

    for row, rewards in zip(PAIRS, outputs["logits"], strict=False):
        for name, reward in zip(("chosen", "rejected"), rewards, strict=True):
            ids = tokenizer()(row["prompt"] + row[name] + "<end>", return_tensors="pt")["input_ids"]
            torch.testing.assert_close(model(input_ids=ids).logits[0, 0], reward, rtol=0, atol=1e-5)


def test_padding_is_what_the_tokenizer_pads_with(tmp_path):
    """Whatever the model's configuration says: its reward is that of the last token before padding."""

    def pads_otherwise():
        model = llama()
        model.config.pad_token_id = 3
        return model

    pads_otherwise().save_pretrained(tmp_path)
    given = {"settings": {"max_duration": "1ba"}}
    expected = trained(tmp_path / "a", **given)

    actual = trained(tmp_path / "b", model=pads_otherwise, **given)

    require_equal(actual, expected)
    assert reward_task(model=str(tmp_path)).model().config.pad_token_id == 0


@pytest.mark.parametrize("value", [-0.01, float("nan"), float("inf")])
def test_a_weight_without_a_meaning_is_refused(value):
    """Rewards would be driven from 0, or be NaN after the first step."""
    with pytest.raises(ValueError, match=f"center_weight={value} isn't a finite number"):
        reward_task(center_weight=value)


def test_rows_that_are_too_long_are_left_out():
    """The end of an answer is what is judged."""
    with pytest.raises(TaskError, match="no row of data has a label in its first 2 tokens"):
        reward_task(max_length=2)


def test_the_command_trains_a_language_model_with_a_new_head(tmp_path, monkeypatch, capsys):
    """As the README says."""
    language_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [
        "fit", "eventloop_llm.reward", "--task.model", "model", "--task.data", "pairs.jsonl",
        "--task.eval-data", "pairs.jsonl", "--device", "cpu", "--run-dir", "run",
    ]  # fmt: skip

    assert main(command) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "samples: 12 pairs of pairs.jsonl; eval: 12 pairs" in shown
    assert "eval/rewards/accuracy" in shown
    assert main(command) == 0, capsys.readouterr().err


@pytest.mark.nightly
def test_the_example_learns_within_a_minute(tmp_path):
    """A tiny model tells words in order from words in the reverse order."""
    runpy.run_path(str(EXAMPLE))["prepare"](tmp_path)
    given = {"eval_data": tmp_path / "eval-pairs.jsonl", "max_length": 128, "lr": 1e-3}
    task = eventloop_llm.reward.task(str(tmp_path / "model"), tmp_path / "pairs.jsonl", **given)

    with isolated_trainer(tmp_path, task, max_duration="60ba") as trainer:
        result = trainer.fit()

    assert result.metrics["eval"]["rewards/accuracy"] > 0.8
