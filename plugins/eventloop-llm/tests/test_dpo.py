"""Trainings on preferences: resumed, on ranks, beside other plugins, from the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from dpo_cases import ANSWERS, CHATS, PAIRS, llama, new_adapters, other, trained
from run_cases import Ends
from safetensors.torch import load, save
from sft_cases import TARGETS, tokenizer

import eventloop_llm.dpo
from eventloop import PluginError, hookimpl
from eventloop.cli import main
from eventloop_check import Check
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_fsdp import Fsdp
from eventloop_jsonl import Jsonl
from eventloop_llm.lora import Lora
from eventloop_muon import Muon
from eventloop_testing import Dies, KilledRuns, isolated_trainer, pretend_device, run_ranks

LOSSES = ["dpo", "ipo", "kto", "orpo", "simpo", "cpo"]
CHATS_EXAMPLE = Path(__file__).parents[1] / "examples" / "chats.py"


def lora():
    return Lora(r=2, target_modules=TARGETS, lora_dropout=0.2)


# Plugins and options that go together.
KINDS = {
    **{loss: (list, {"loss": loss}) for loss in LOSSES},
    "another reference": (list, {"reference_model": other, "microbatch_size": 2}),
    "stored": (list, {"store_reference": True}),
    "stored, kto": (list, {"store_reference": True, "loss": "kto", "microbatch_size": 2}),
    "lora": (lambda: [lora()], {"microbatch_size": 2}),
    "lora, stored": (lambda: [lora()], {"store_reference": True}),
    "all at once": (
        lambda: [lora(), Ema(half_life="3ba"), Muon(), Checkpointing()], {"microbatch_size": 1},
    ),
}  # fmt: skip


def fit(folder, batch, kind, *more):
    """Trains two epochs with evaluations; may die."""
    plugins, options = KINDS[kind]
    settings = {"checkpoint_interval": "1ba", "callbacks": [Jsonl()]}
    options = {"eval_data": PAIRS[:4], "max_new_tokens": 3, "num_samples": 1} | options
    return trained(folder, *plugins(), *more, Dies(batch), settings=settings, **options)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_with_the_bits_of_one_in_one_go(tmp_path, kind):
    """In mid-epoch, at its end and in the next one."""
    runs = KilledRuns(fit, tmp_path / "one-go", kind)

    assert runs.differing(tmp_path / "killed", 1, 2, 3) == []


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
def test_an_accelerator_has_the_bits_of_the_cpu(tmp_path, kind):
    """Weights and losses; random numbers are drawn as on the host."""
    plugins, options = KINDS[kind]

    expected = trained(tmp_path / "cpu", *plugins(), settings={"device": "cpu"}, **options)
    with pretend_device(draws_from_host=True):
        there = {"device": "pretend"}
        actual = trained(tmp_path / "there", *plugins(), settings=there, **options)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_microbatches_train_what_one_process_does(tmp_path, kind):
    """Whole and sharded; dropout draws otherwise on each rank, and is left out."""
    plugins, options = KINDS[kind]
    options = {"shuffle": False, "eval_data": PAIRS[:4], "max_new_tokens": 3} | options

    def train(name, *more, **given):
        made = [one for one in plugins() if not isinstance(one, Lora)]
        adapters = [Lora(r=2, target_modules=TARGETS)] * (len(made) < len(plugins()))
        return trained(tmp_path / name, *adapters, *made, *more, **options | given)

    expected = train("whole", batch_size=6, microbatch_size=None)
    atol = 1e-3 if kind == "all at once" else 2e-5  # Muon makes small differences larger

    for size in (1, 3):
        found = train(f"cut in {size}", batch_size=6, microbatch_size=size)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    for name, strategy in {"ddp": list, "fsdp": lambda: [Fsdp()]}.items():
        found = run_ranks(lambda: train(name, *strategy(), batch_size=3))[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["kto", "stored", "lora"])
def test_two_ranks_go_on_with_the_same_bits(tmp_path, kind, strategy):
    """The reference is built or read again."""
    more = [Fsdp()] if strategy == "fsdp" else []

    def stopped():
        try:
            fit(tmp_path / "two", None, kind, *more, Ends(1))
        except EOFError:
            return True

    expected = run_ranks(lambda: fit(tmp_path / "one", None, kind, *more))
    assert run_ranks(stopped) == [True, True]
    actual = run_ranks(lambda: fit(tmp_path / "two", None, kind, *more, Ends(None)))
    torch.testing.assert_close(
        [one for one, _ in actual], [one for one, _ in expected], rtol=0, atol=0
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["dpo", "kto", "cpo", "stored", "lora"])
def test_a_step_reads_nothing_from_the_device(tmp_path, kind):
    """Numbers of a batch stay on the device, and so does what is looked up."""
    plugins, options = KINDS[kind]
    check = Check()
    trained(tmp_path, *plugins(), settings={"observers": [check]}, **options)

    assert [str(one) for one in check.findings if one.kind == "read"] == []


def test_a_read_would_be_seen(tmp_path):
    """Control: with attention written out transformers look for packed rows."""
    check = Check()
    eager = lambda: llama(attn_implementation="eager")  # noqa: E731
    trained(tmp_path, model=eager, loss="simpo", settings={"observers": [check]})

    assert [one for one in check.findings if one.kind == "read"]


def test_what_is_logged(tmp_path):
    """Rewards, in training and of the eval set, and what the model answers."""
    logged, texts = {}, []

    class Reads:
        name = "reads"

        @hookimpl
        def log(self, state, numbers, at):
            logged.update(numbers)

        @hookimpl
        def log_text(self, state, texts, at):
            kept.append(texts)

    kept = texts
    given = {"eval_data": CHATS[:4], "max_new_tokens": 3, "num_samples": 2}
    trained(tmp_path, reference_model=other, settings={"callbacks": [Reads()]}, **given)

    for name in ("chosen", "rejected", "margin", "accuracy"):
        assert {f"rewards/{name}", f"eval/rewards/{name}"} <= logged.keys()
    margin = logged["rewards/chosen"] - logged["rewards/rejected"]
    assert logged["rewards/margin"] == pytest.approx(margin, abs=1e-6)
    assert len(texts[0]["samples"]["prompt"]) == 2


def test_rewards_of_answers_are_those_of_the_whole_batch(tmp_path):
    """Microbatches have different numbers of desired answers, and some have none."""
    logged = []

    class Reads:
        name = "reads"

        @hookimpl
        def log(self, state, numbers, at):
            logged.append({one: numbers[f"rewards/{one}"] for one in ("desired", "undesired")})

    settings = {"callbacks": [Reads()], "max_duration": "1ba", "log_interval": "1ba"}
    for size in (6, 1):
        given = {"rows": ANSWERS, "loss": "kto", "reference_model": other, "microbatch_size": size}
        trained(tmp_path / str(size), settings=settings, **given)

    assert logged[0] == pytest.approx(logged[-1], abs=1e-6)
    assert logged[0]["desired"] != logged[0]["undesired"]


def test_what_is_stored_is_needed_to_go_on(tmp_path):
    """Without it the trained model would be its own reference; of other data it is of no use."""
    with pytest.raises(EOFError):
        fit(tmp_path, None, "stored", Ends(2))
    file = tmp_path / "run" / "reference.safetensors"
    content = file.read_bytes()
    file.unlink()

    with pytest.raises(PluginError, match="log-probabilities, is missing in"):
        fit(tmp_path, None, "stored", Ends(None))
    found = load(content)
    file.write_bytes(save({**found, "digest": found["digest"].flip(0)}))
    with pytest.raises(PluginError, match="belongs to other data"):
        fit(tmp_path, None, "stored", Ends(None))
    file.write_bytes(content)
    assert fit(tmp_path, None, "stored", Ends(None))


def test_adapters_that_are_not_there_are_an_error(tmp_path):
    """It says how to have some."""
    with pytest.raises(PluginError, match="no adapters that could be switched off"):
        trained(tmp_path, reference="adapters-off")


def test_the_reference_of_a_model_with_adapters_has_none(tmp_path):
    """At the first step a new adapter adds nothing: the loss is that of equal models."""
    _, losses = trained(tmp_path, model=new_adapters)

    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert losses[-1] < losses[0]


def test_the_command_trains_and_goes_on(tmp_path, monkeypatch, capsys):
    """As the README says; what is done isn't done again."""
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [
        "fit", "eventloop_llm.dpo", "--task.model", "model", "--task.data", "pairs.jsonl", "--task.loss",
        "ipo", "--task.store-reference", "true", "--device", "cpu", "--run-dir", "run",
    ]  # fmt: skip

    assert main(command) == 0, capsys.readouterr().err
    assert "samples: 12 pairs of pairs.jsonl" in capsys.readouterr().out
    assert main(command) == 0, capsys.readouterr().err
    assert main([*command, "--task.reference-model", "nothing", "--run-dir", "other"]) != 0
    assert "can't be loaded from 'nothing'" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_example_learns_within_a_minute(tmp_path):
    """A tiny model prefers what it is shown."""
    example = runpy.run_path(str(CHATS_EXAMPLE))
    example["prepare"](tmp_path)
    given = {"eval_data": tmp_path / "eval-pairs.jsonl", "max_length": 128, "max_new_tokens": 4}
    task = eventloop_llm.dpo.task(
        str(tmp_path / "model"), tmp_path / "pairs.jsonl", lr=1e-3, **given
    )

    with isolated_trainer(tmp_path, task, max_duration="15ba") as trainer:
        result = trainer.fit()

    assert result.metrics["eval"]["loss"] < 0.66
    assert result.metrics["eval"]["rewards/accuracy"] > 0.6
