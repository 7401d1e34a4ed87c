"""The task of prompts: from a file to batches, and a whole run from the command line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import eventloop_llm.grpo
from eventloop import TaskError
from eventloop.cli import main

EXAMPLE = Path(__file__).parents[1] / "examples" / "chats.py"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with a tiny model, a tokenizer and data."""
    folder = tmp_path_factory.mktemp("chats")
    runpy.run_path(str(EXAMPLE))["prepare"](folder)
    return folder


def test_prompts_are_padded_on_the_left_with_what_rows_have(chats):
    """Texts, messages, and chats up to their last answer; columns are what all rows of a batch have."""
    question = {"role": "user", "content": "What is it?"}
    rows = [
        {"prompt": "a b", "answer": 1, "rare": 2},
        {"prompt": [question], "answer": 2},
        {"messages": [question, {"role": "assistant", "content": "This."}], "answer": 3},
    ]
    task = eventloop_llm.grpo.task(str(chats / "model"), rows, batch_size=3, shuffle=False)

    (batch,) = task.train_dataloader

    num_tokens = batch["attention_mask"].sum(1)
    assert batch.keys() == {"input_ids", "attention_mask", "answer"}
    assert batch["answer"] == [1, 2, 3]
    assert num_tokens[0] < num_tokens[1] == num_tokens[2] == batch["input_ids"].shape[1]
    assert batch["attention_mask"][0].tolist() == sorted(batch["attention_mask"][0].tolist())
    assert torch.equal(batch["input_ids"][1], batch["input_ids"][2])


def test_a_row_without_a_prompt_is_named(chats):
    """With its number."""
    with pytest.raises(TaskError, match="row 1 of data can't be trained on: it has 'text'"):
        eventloop_llm.grpo.task(str(chats / "model"), [{"prompt": "a"}, {"text": "b"}])


def test_the_command_generates_and_learns(chats, tmp_path, monkeypatch, capsys):
    """A file of questions, a file with a function that judges, and resumed after it is done."""
    lines = (chats / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "judge.py").write_text(
        "def short(rollouts):\n    return -rollouts.completion_mask.sum(1)\n"
    )
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [
        "fit", "eventloop_llm.grpo", "--task.model", str(chats / "model"), "--task.data", "prompts.jsonl",
        "-p", "grpo", "--grpo.num-generations", "2", "--grpo.reward", "./judge.py:short",
        "--grpo.max-tokens", "4", "--device", "cpu", "--run-dir", "run",
    ]  # fmt: skip

    assert main([*command[:6], "--device", "cpu"]) != 0
    assert "the plugin grpo is off" in capsys.readouterr().err
    assert main(command) == 0, capsys.readouterr().err
    assert "1 epoch, 2 batches" in capsys.readouterr().out
    assert main(command) == 0, capsys.readouterr().err
