"""What a step costs under transformers' loop and under eventloop's, interleaved, and how often each reads.

    python overhead.py [--rounds 7] [--json]

A GPT-2 of one layer and 8 numbers, batches of 2, so that the loop is most of a step. A line for each set-up:
microseconds of processor time a step in a plain loop that does the same work, what each trainer adds to it, in
the median of the rounds, and reads from the device a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import eventloop_transformers

NUM_STEPS, WARM_UP = 300, 50
SET_UPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation of 4": {"gradient_accumulation_steps": 4},
    "bf16": {"bf16": True},
    "no clipping": {"max_grad_norm": 0.0},
}


class Timed(transformers.TrainerCallback):
    """Notes the processor's time after the warm-up, and at the end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes it."""
        if state.global_step == WARM_UP:
            self.start = time.process_time()
        if state.global_step == NUM_STEPS:
            self.end = time.process_time()

    @property
    def microseconds(self) -> float:
        """Of a step, in the mean."""
        return (self.end - self.start) / (NUM_STEPS - WARM_UP) * 1e6


class Reads(TorchDispatchMode):
    """Counts the operations that copy a number to the host."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(2, 20, (64, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one} for one in tokens]


def trained(kind: type, folder: str, num_steps: int, **more: Any) -> Timed:
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=num_steps, report_to=[],
        logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True, **more,
    )  # fmt: skip
    timed = Timed()
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    kind(model=model, args=args, train_dataset=rows(), callbacks=[timed]).train()
    return timed


def plain(num_steps: int, **more: Any) -> float:
    """Returns the microseconds of a step without a trainer: of these batches, with these arguments."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    loader = torch.utils.data.DataLoader(rows(), 2, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    accumulated = more.get("gradient_accumulation_steps", 1)
    start = 0.0
    for step in range(num_steps):
        if step == WARM_UP:
            start = time.process_time()
        for batch in itertools.islice(batches, accumulated):
            with torch.autocast("cpu", torch.bfloat16, enabled=more.get("bf16", False)):
                loss = model(**batch).loss
            (loss / accumulated).backward()
        if more.get("max_grad_norm", 1.0):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return (time.process_time() - start) / (num_steps - WARM_UP) * 1e6


def reads_a_step(kind: type, folder: str, **more: Any) -> float:
    found = []
    for num_steps in (10, 20):
        with Reads() as reads:
            trained(kind, folder, num_steps, **more)
        found.append(reads.num)
    return (found[1] - found[0]) / 10


def measured(name: str, rounds: int, folder: str) -> dict[str, Any]:
    """Measures a set-up; returns its line."""
    more, kinds = (
        SET_UPS[name],
        {"theirs": transformers.Trainer, "ours": eventloop_transformers.Trainer},
    )
    base: list[float] = []
    added: dict[str, list[float]] = {one: [] for one in kinds}
    for _ in range(rounds):
        base.append(plain(NUM_STEPS, **more))
        for loop, kind in kinds.items():
            cost = trained(kind, folder, NUM_STEPS, **more).microseconds
            added[loop].append(cost - base[-1])
    found = {f"{loop}_us": statistics.median(costs) for loop, costs in added.items()}
    reads = {f"{loop}_reads": reads_a_step(kind, folder, **more) for loop, kind in kinds.items()}
    return {"name": name, "plain_us": statistics.median(base), **found, **reads}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    folder = tempfile.mkdtemp()
    lines = [measured(name, given.rounds, folder) for name in SET_UPS]
    if given.json:
        print(json.dumps(lines, indent=1))
        return
    for one in lines:
        print(
            f"{one['name']:18} plain loop {one['plain_us']:6.0f} us, transformers' adds "
            f"{one['theirs_us']:6.0f} us, ours {one['ours_us']:6.0f} us: "
            f"{one['ours_us'] / one['theirs_us']:.0%}; reads a step: "
            f"{one['theirs_reads']:g} and {one['ours_reads']:g}"
        )


if __name__ == "__main__":
    main()
