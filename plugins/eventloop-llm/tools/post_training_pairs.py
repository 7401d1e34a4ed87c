"""Pairs of tasks and plugins: each two of this package, and each with plugins of other packages.

    python plugins/eventloop-llm/tools/post_training_pairs.py           prints the table of the README

A pair trains a tiny Llama for two epochs, and once more with an end in the middle of one and in the next; a
task that neither of the two has is `sft`. It is correct if the weights have the same bits; if
one of the two only watches, also those of the run without it; and with `fsdp` or `checkpointing` those of
the run without them within 1e-5. Otherwise it has to be refused, with a reason.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from run_cases import Ends

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import reward_cases
import sft_cases
import sft_pairs

import eventloop_llm.dpo
import eventloop_llm.grpo
import eventloop_llm.reward
import eventloop_llm.sft
from eventloop import EventloopError, Task
from eventloop.cli import main as command_line
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_fsdp import Fsdp
from eventloop_jsonl import Jsonl
from eventloop_llm.hf_checkpoints import HfCheckpoints
from eventloop_llm.lora import Lora
from eventloop_muon import Muon
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_wandb import Wandb

PACKAGES = ("sft", "packing", "lora", "dpo", "reward", "grpo", "hf-checkpoints")
OTHERS = ("ema", "muon", "fsdp", "checkpointing", "jsonl", "wandb")
PAIRS = [*itertools.combinations(PACKAGES, 2), *itertools.product(PACKAGES, OTHERS)]
TASKS = ("sft", "dpo", "reward", "grpo")
WATCHERS = ("hf-checkpoints", "jsonl", "wandb")
# What changes no more than the order of additions.
NEARLY = ("fsdp", "checkpointing")
CORRECT, REFUSED = "yes", "refused"
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """What came of a pair.

    Args:
        mark: CORRECT, REFUSED, or what is wrong.
        reason: of a refusal: the first line of the message.
    """

    mark: str
    reason: str = ""


def short(rollouts: Any) -> torch.Tensor:
    """Returns more for shorter completions, and for some tokens."""
    ids, mask = rollouts.completion_ids, rollouts.completion_mask
    return ((ids % 7 == 0) * mask).sum(1) - 0.1 * mask.sum(1)


# Each made anew for a run.
PARTS: dict[str, Callable[[], Any]] = {
    "lora": lambda: Lora(r=2, target_modules=sft_cases.TARGETS),
    "grpo": lambda: eventloop_llm.grpo.Grpo(num_generations=3, reward=short, max_tokens=4),
    "hf-checkpoints": lambda: HfCheckpoints(interval="2ba"),
    "ema": lambda: Ema(half_life="3ba"),
    "muon": Muon,
    "fsdp": Fsdp,
    "checkpointing": Checkpointing,
    "jsonl": Jsonl,
    "wandb": lambda: Wandb(mode="offline", project="pairs"),
}


def task_of(names: Sequence[str], batch_size: int) -> Task:
    """Returns the task that one of the names has, `sft` where none has."""
    kind = next((one for one in TASKS if one in names), "sft")
    tokenizer = sft_cases.tokenizer()
    given: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "lr": 1e-2}
    if kind == "grpo":
        rows = [{"prompt": row["prompt"]} for row in sft_pairs.PAIRS]
        return eventloop_llm.grpo.task(sft_cases.llama, rows, **given)
    given |= {"warmup": None, "max_length": 48}
    rows = sft_pairs.PAIRS
    if kind == "reward":
        return eventloop_llm.reward.task(reward_cases.llama, rows, eval_data=rows[:4], **given)
    given |= {"num_samples": 1, "max_new_tokens": 2}
    if kind == "dpo":
        return eventloop_llm.dpo.task(sft_cases.llama, rows, eval_data=rows[:4], **given)
    rows = sft_cases.CHATS[:12]
    given["packing"] = "packing" in names
    return eventloop_llm.sft.task(sft_cases.llama, rows, eval_data=rows[:4], **given)


def trained(folder: Path, names: Sequence[str], batch: int | None = None) -> Weights:
    """Trains what names stand for; with a batch, up to there."""
    plugins = [PARTS[one]() for one in names if one in PARTS]
    callbacks = [one for one in plugins if isinstance(one, Jsonl | HfCheckpoints | Wandb)]
    algorithms = [one for one in plugins if one not in callbacks]
    size = 2 if "packing" in names else 6
    task = task_of(names, size // int(os.environ.get("WORLD_SIZE", "1")))
    settings: dict[str, Any] = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
    built = isolated_trainer(
        folder, task, algorithms=[*algorithms, Ends(batch)], callbacks=callbacks, **settings
    )
    with contextlib.suppress(EOFError), built as trainer:
        trainer.fit()
        return sft_cases.weights(trainer.state.model)
    return {}


def judged(folder: Path, pair: Sequence[str]) -> Verdict:
    """Trains a pair, once in one go and once with two ends; on each rank of one or two."""
    expected = trained(folder / "one go", pair)
    for batch in (1, 3, None):
        actual = trained(folder / "resumed", pair, batch)
    if what := differing(actual, expected, 0.0):
        return Verdict(f"resumed, {what}")
    for names, atol in ((WATCHERS, 0.0), (NEARLY, 1e-5)):
        rest = [one for one in pair if one not in names]
        if rest != list(pair):
            alone = trained(folder / "-".join(rest), rest)
            if what := differing(expected, alone, atol):
                return Verdict(f"without {', '.join(set(pair) - set(rest))}, {what}")
    return Verdict(CORRECT)


def differing(actual: Weights, expected: Weights, atol: float) -> str:
    """Returns how far weights are from others, empty if they aren't; names of wrappers don't count."""
    ours, others = ([*one.values()] for one in (actual, expected))
    if len(ours) != len(others):
        return f"{len(ours)} weights, not {len(others)}"
    far = max(float((one - two).abs().max()) for one, two in zip(ours, others, strict=True))
    return "" if far <= atol else f"weights differ by {far:.1e}"


def verdict(first: str, second: str) -> Verdict:
    """Tries a pair."""
    with tempfile.TemporaryDirectory(prefix="pairs-") as place:
        folder = Path(place)
        if (refusal := _refused_by_command(folder, first, second)) is not None:
            return refusal
        if "fsdp" in (first, second):
            return run_ranks(_safely, folder, (first, second))[0]
        return _safely(folder, (first, second))


def _safely(folder: Path, pair: Sequence[str]) -> Verdict:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return judged(folder, pair)
    except (EventloopError, ValueError) as error:
        return Verdict(REFUSED, str(error).partition("\n")[0])


def _refused_by_command(folder: Path, first: str, second: str) -> Verdict | None:
    """Returns what the command says of two tasks, and of an option that a task lacks."""
    tasks = [one for one in (first, second) if one in TASKS and one != "grpo"]
    module = {one: f"eventloop_llm.{one}" for one in TASKS}
    if len(tasks) == 2:
        argv = ["fit", module[first], module[second]]
    elif "packing" in (first, second) and {first, second} & {"dpo", "reward", "grpo"}:
        (task,) = {first, second} - {"packing"}
        argv = ["fit", module[task], "--task.packing", "true"]
    else:
        return None
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = command_line(argv)
        except SystemExit as error:
            status = error.code
    (folder / "said").write_text(said.getvalue())
    lines = [one for one in said.getvalue().splitlines() if "rror" in one] or ["nothing"]
    return Verdict(REFUSED, lines[0]) if status else Verdict("trains in spite of it")


def table(verdicts: dict[tuple[str, str], Verdict]) -> str:
    """Returns a table in Markdown."""
    lines = ["| | " + " | ".join((*PACKAGES[1:], *OTHERS)) + " |"]
    lines.append("| --- |" + " --- |" * (len(PACKAGES) - 1 + len(OTHERS)))
    for first in PACKAGES:
        cells = [
            verdicts[first, second].mark if (first, second) in verdicts else ""
            for second in (*PACKAGES[1:], *OTHERS)
        ]
        lines.append(f"| **{first}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    chosen = [one for one in PAIRS if not sys.argv[1:] or set(sys.argv[1:]) <= {*one}]
    found = {}
    for one in chosen:
        found[one] = verdict(*one)
        print(*one, found[one].mark, found[one].reason, file=sys.stderr, flush=True)
    if len(found) == len(PAIRS):
        print(table(found))
