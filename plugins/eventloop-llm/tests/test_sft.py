"""Trainings on chats: resumed, on ranks, beside other plugins, from the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from run_cases import Ends
from safetensors.torch import load_file
from sft_cases import CHATS, TARGETS, llama, sft_task, tokenizer, trained, weights

from eventloop import TaskError, hookimpl
from eventloop.cli import main
from eventloop_check import Check
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_fsdp import Fsdp
from eventloop_jsonl import Jsonl
from eventloop_llm.lora import Lora
from eventloop_muon import Muon
from eventloop_testing import Dies, KilledRuns, isolated_trainer, pretend_device, run_ranks

README = Path(__file__).parents[1] / "README.md"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chats.py"


def lora():
    return Lora(r=2, target_modules=TARGETS)


# Plugins and options that go together.
KINDS = {
    "padded": (list, {}),
    "parts": (list, {"microbatch_size": 2, "num_workers": 2}),
    "packed": (list, {"packing": True, "batch_size": 2}),
    "packed, lora": (lambda: [lora()], {"packing": True, "batch_size": 2}),
    "all at once": (
        lambda: [lora(), Ema(half_life="3ba"), Muon(), Checkpointing()],
        {"packing": True, "batch_size": 2, "microbatch_size": 1},
    ),
}


def fit(folder, batch, kind, *more):
    """Trains two epochs with evaluations; may die."""
    plugins, options = KINDS[kind]
    settings = {"checkpoint_interval": "1ba", "callbacks": [Jsonl()]}
    options = {"eval_data": CHATS[:4], "max_new_tokens": 3} | options
    return trained(folder, *plugins(), *more, Dies(batch), settings=settings, **options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_with_the_bits_of_one_in_one_go(tmp_path, kind):
    """In mid-epoch, at its end and in the next one; with samples generated in between."""
    runs = KilledRuns(fit, tmp_path / "one-go", kind)

    assert runs.differing(tmp_path / "killed", 1, 2, 4) == []
    lines = [(tmp_path / one / "run" / "metrics.jsonl").read_text() for one in ("one-go", "killed")]
    numbers = [[_untimed(line) for line in text.splitlines()] for text in lines]
    assert numbers[0] == numbers[1]
    assert any("samples" in line for line in numbers[0])


def _untimed(line):
    found = json.loads(line)
    return json.dumps({name: one for name, one in found.items() if name not in ("run", "seconds")})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
def test_an_accelerator_has_the_bits_of_the_cpu(tmp_path, kind):
    """Random numbers are drawn as on the host."""
    plugins, options = KINDS[kind]

    expected = trained(tmp_path / "cpu", *plugins(), settings={"device": "cpu"}, **options)
    with pretend_device(draws_from_host=True):
        there = {"device": "pretend"}
        actual = trained(tmp_path / "there", *plugins(), settings=there, **options)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_what_one_process_does(tmp_path, kind):
    """Whole and sharded: each label counts once, whoever has it."""
    plugins, options = KINDS[kind]
    options = {"shuffle": False, "eval_data": CHATS[:4], "max_new_tokens": 3} | options
    options |= {"batch_size": 6 if options.get("packing") else 14, "num_workers": 0}
    atol = 2e-4 if kind == "all at once" else 2e-5  # Muon makes small differences larger
    expected = trained(tmp_path / "one", *plugins(), **options)
    options["batch_size"] //= 2

    for name, strategy in {"ddp": list, "fsdp": lambda: [Fsdp()]}.items():
        shared = lambda: trained(tmp_path / name, *plugins(), *strategy(), **options)  # noqa: E731
        torch.testing.assert_close(run_ranks(shared)[0], expected, rtol=0, atol=atol)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_go_on_with_the_same_bits(tmp_path, strategy):
    """Also in samples, which all ranks generate."""
    more = [Fsdp()] if strategy == "fsdp" else []
    expected = run_ranks(lambda: fit(tmp_path / "one", None, "packed, lora", *more))

    def stopped():
        try:
            fit(tmp_path / "two", None, "packed, lora", *more, Ends(1))
        except EOFError:
            return True

    assert run_ranks(stopped) == [True, True]
    actual = run_ranks(lambda: fit(tmp_path / "two", None, "packed, lora", *more, Ends(None)))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"packing": True}, {"microbatch_size": 2}], ids=str)
def test_a_step_reads_nothing_from_the_device(tmp_path, options):
    """Neither do transformers, which look at masks unless they get one for each pair of tokens."""
    check = Check()
    trained(tmp_path, settings={"observers": [check]}, **options)

    assert [str(one) for one in check.findings if one.kind == "read"] == []


def test_a_read_would_be_seen(tmp_path):
    """Control: with attention written out transformers look for packed rows."""
    check = Check()
    trained(
        tmp_path, model=lambda: llama(attn_implementation="eager"), settings={"observers": [check]}
    )

    assert [one for one in check.findings if one.kind == "read"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [{"attn_implementation": "eager"}, {}], ids=["eager", "sdpa"])
def test_models_of_all_kinds_of_attention_are_trained_alike(tmp_path, changes):
    """The mask is another way to say what positions say."""
    expected = trained(tmp_path / "one", packing=True)

    actual = trained(tmp_path / "two", packing=True, model=lambda: llama(**changes))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_samples_and_numbers_of_an_evaluation(tmp_path):
    """The table has what the eval data ask, what the model says, and what it should have said."""
    texts = []

    class Reads:
        name = "reads"
        log_text = _log_text(texts)

    task = sft_task(eval_data=CHATS[:5], num_samples=2, max_new_tokens=3)
    with isolated_trainer(tmp_path, task, callbacks=[Reads()]) as trainer:
        result = trainer.fit()

    table = texts[0]["samples"]
    assert len(table["prompt"]) == 2
    assert table["prompt"][0].endswith("<end> <assistant>")
    assert table["expected"][0] == CHATS[0]["messages"][-1]["content"]
    assert 0 <= result.metrics["eval"]["accuracy"] <= 1
    assert result.metrics["eval"]["loss"] > 0


def _log_text(kept):
    @hookimpl
    def log_text(self, state, texts, at):
        kept.append(texts)

    return log_text


def test_the_header_says_what_the_data_are(tmp_path):
    """What was cut or left out, too."""
    with isolated_trainer(tmp_path, sft_task(max_length=12)) as trainer:
        notes = " ".join(trainer.notes)

    assert "rows of data" in notes
    assert "trained on" in notes
    assert "cut to 12 tokens" in notes


def saved(folder):
    """Writes a model with its tokenizer, and chats."""
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))


def test_the_command_trains_and_peft_loads_what_it_exports(tmp_path, monkeypatch, capsys):
    """As the README says, resumed after it is done, too."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [
        "fit", "eventloop_llm.sft", "--task.model", "model", "--task.data", "chats.jsonl",
        "--task.eval-data", "chats.jsonl", "--task.packing", "true", "--task.max-length", "64",
        "--task.max-new-tokens", "3", "-p", "lora", "--lora.r", "2", "--lora.target_modules",
        '["q_proj"]', "--max-duration", "2ep", "--device", "cpu", "--export", "adapter/",
    ]  # fmt: skip
    assert main([*command, "--run-dir", "run"]) == 0, capsys.readouterr().err
    assert main([*command, "--run-dir", "run"]) == 0, capsys.readouterr().err

    merged = [*command[:-1], "merged/", "--lora.merge", "true"]
    assert main([*merged, "--run-dir", "run"]) == 0, capsys.readouterr().err

    model = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([tokenizer()("w1 w2 w3")["input_ids"]])
    torch.testing.assert_close(whole(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    for folder in ("adapter", "merged"):
        loaded = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert loaded.chat_template == tokenizer().chat_template
    own = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(one.numel() for one in own.values()) == sum(
        one.numel() for name, one in model.named_parameters() if "lora_" in name
    )


@pytest.mark.nightly
def test_the_example_learns_within_a_minute(tmp_path):
    """A tiny model says more of what functions are for than it did."""
    example = runpy.run_path(str(EXAMPLE))
    task = example["task"](tmp_path / "chats")
    task.settings["max_duration"] = "20ba"

    with isolated_trainer(tmp_path, task, eval_at_start=True, max_duration="20ba") as trainer:
        result = trainer.fit()

    losses = [float(one["eval/loss"]) for one in result.history]
    assert losses[-1] < losses[0] - 0.8
    assert weights(trainer.state.model)


def test_a_model_that_can_not_keep_documents_apart_is_not_packed_for(tmp_path):
    """Bloom takes no positions: what is packed into a row would be one document."""
    from transformers import BloomConfig, BloomForCausalLM

    def bloom():
        return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))

    isolated_trainer(tmp_path / "rows", sft_task(model=bloom)).close()
    with pytest.raises(TaskError, match="the model takes no position_ids"):
        isolated_trainer(tmp_path / "packed", sft_task(model=bloom, packing=True))
