"""What packing saves and what LoRA costs, on the CPU, with 95 % intervals over seeds.

    python plugins/eventloop-llm/tools/savings.py packing|lora [SEEDS]

Packing: functions of Python's standard library as texts of very different lengths, padded, and packed
into rows, with as many tokens in a step on average; CPU seconds by turns. LoRA: a model that has learnt some chats
learns others, whole and by adapters; sizes are those of the files of a checkpoint.
"""

from __future__ import annotations

import ast
import json
import math
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import eventloop_llm.sft
from eventloop import Trainer
from eventloop_export import Export
from eventloop_llm.lora import Lora

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "chats.py"))
# What is trained: the learning rate, and the options of `lora`.
ARMS: dict[str, tuple[float, dict[str, Any] | None]] = {
    "whole": (3e-3, None),
    "LoRA, r=8": (1e-2, {"r": 8}),
    "LoRA, r=8, head and embedding whole": (
        3e-3, {"r": 8, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
}  # fmt: skip
LENGTH, ROWS, TEXTS = 512, 8, 240


def texts() -> list[dict[str, str]]:
    """Functions with their sources, every few of them."""
    found = [
        ast.get_source_segment(text, node)
        for _, text in EXAMPLE["sources"]()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    found = [one for one in found if one]
    return [{"text": one} for one in found[:: len(found) // TEXTS][:TEXTS]]


def interval(values: Sequence[float]) -> str:
    """Returns the mean with a 95 % interval."""
    half = 0.0
    if len(values) > 1:
        # Student's t for the few seeds of a run.
        t = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)
        half = t * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def fitted(task: Any, seed: int, duration: str, **given: Any) -> tuple[Any, float, Trainer]:
    """Trains; returns the result, the CPU seconds of the fit, and the trainer."""
    options = {"autoload": False, "seed": seed, "max_duration": duration, "device": "cpu"} | given
    with Trainer(task, **options) as trainer:
        start = time.process_time()
        result = trainer.fit()
        return result, time.process_time() - start, trainer


def filled_in(task: Any) -> tuple[float, int]:
    """Returns the share of an epoch's tokens that aren't padding, and how many they are."""
    batches = [*task.train_dataloader]
    num = sum(int((one["document_ids"] >= 0).sum()) for one in batches)
    return num / sum(one["input_ids"].numel() for one in batches), num


def packing(folder: Path, seeds: int) -> Iterator[str]:
    """Trains padded and packed by turns."""
    rows = texts()
    train, evals = rows[::2] + rows[1::4], rows[3::4]
    model = str(folder / "model")
    given = {"eval_data": evals, "max_length": LENGTH, "lr": 3e-3, "num_samples": 0}

    def task(*, is_packed: bool, size: int) -> Any:
        return eventloop_llm.sft.task(model, train, packing=is_packed, batch_size=size, **given)

    packed, num_tokens = filled_in(task(is_packed=True, size=ROWS))
    per_row = num_tokens / len(train)
    size = round(ROWS * LENGTH * packed / per_row)  # texts in a step, as many as packed
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, list[float]] = {False: [], True: []}
    padded = []
    for seed in range(seeds):
        for is_packed in (False, True) if seed % 2 else (True, False):
            made = task(is_packed=is_packed, size=ROWS if is_packed else size)
            if not is_packed:
                torch.manual_seed(seed)
                padded.append(filled_in(made)[0])
            result, took, _ = fitted(made, seed, "2ep")
            seconds[is_packed].append(took)
            losses[is_packed].append(float(result.metrics["eval"]["loss"]))
    yield f"packing: {len(train)} texts of {per_row:.0f} tokens on average, {size} in a step"
    yield f"  tokens that aren't padding, padded {interval(padded)}, packed {packed:.3f}"
    ratios = [one / two for one, two in zip(seconds[False], seconds[True], strict=True)]
    yield f"  CPU seconds padded over packed {interval(ratios)}"
    for is_packed, name in ((False, "padded"), (True, "packed")):
        yield f"  eval/loss {name} {interval(losses[is_packed])}"


def lora(folder: Path, seeds: int) -> Iterator[str]:
    """Trains whole and by adapters."""
    chats = list(map(json.loads, (folder / "chats.jsonl").read_text().splitlines()))
    first, second = chats[:340], chats[340:]
    evals = folder / "eval-chats.jsonl"
    given = {"tokenizer": str(folder / "model"), "max_length": 128, "batch_size": 16}
    base = eventloop_llm.sft.task(str(folder / "model"), first, lr=3e-3, **given)
    with Trainer(
        base, algorithms=[Export()], autoload=False, max_duration="5ep", device="cpu"
    ) as trainer:
        trainer.fit()
        trainer.export(f"{folder / 'base'}/")
    before = None
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        for name, (lr, options) in ARMS.items():
            plugins = [] if options is None else [Lora(target_modules=["all-linear"], **options)]
            task = eventloop_llm.sft.task(
                str(folder / "base"), second, eval_data=evals, lr=lr, num_samples=0, **given
            )
            run_dir = folder / f"{name}{seed}"
            result, took, trainer = fitted(
                task, seed, "5ep", algorithms=plugins, run_dir=run_dir, eval_at_start=True
            )
            params = [one for one in trainer.state.model.parameters() if one.requires_grad]
            last = max((run_dir / "checkpoints").glob("ba*"))
            size = sum(one.stat().st_size for one in last.iterdir())
            before = float(result.history[0]["eval/loss"])
            kept = found.setdefault(name, {})
            for what, value in {
                "eval/loss": float(result.metrics["eval"]["loss"]), "CPU seconds": took,
                "parameters trained": sum(one.numel() for one in params),
                "MB of gradients and of AdamW's averages": 12e-6 * sum(one.numel() for one in params),
                "MB of a checkpoint": 1e-6 * size,
            }.items():  # fmt: skip
                kept.setdefault(what, []).append(value)
    yield f"LoRA: {len(second)} chats after {len(first)} others, eval/loss before {before:.3f}"
    for name, kept in found.items():
        for what, values in kept.items():
            yield f"  {name}: {what} {interval(values)}"


if __name__ == "__main__":
    part = {"packing": packing, "lora": lora}[sys.argv[1]]
    num = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as place:
        EXAMPLE["prepare"](Path(place))
        for line in part(Path(place), num):
            print(line, flush=True)
