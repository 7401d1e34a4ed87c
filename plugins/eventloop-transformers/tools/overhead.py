"""What a step costs under transformers' loop and under eventloop's, interleaved, and how often each reads.

    python overhead.py [ROUNDS]

A GPT-2 of one layer and 8 numbers, batches of 2, so that the loop is most of a step. A line for each set-up:
microseconds of processor time a step, in the median of the rounds, and reads from the device a step.
"""

from __future__ import annotations

import statistics
import sys
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


def reads_a_step(kind: type, folder: str, **more: Any) -> float:
    found = []
    for num_steps in (10, 20):
        with Reads() as reads:
            trained(kind, folder, num_steps, **more)
        found.append(reads.num)
    return (found[1] - found[0]) / 10


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    kinds = {"theirs": transformers.Trainer, "ours": eventloop_transformers.Trainer}
    folder = tempfile.mkdtemp()
    for name, more in SET_UPS.items():
        times: dict[str, list[float]] = {one: [] for one in kinds}
        for _ in range(rounds):
            for loop, kind in kinds.items():
                times[loop].append(trained(kind, folder, NUM_STEPS, **more).microseconds)
        cost = {one: statistics.median(found) for one, found in times.items()}
        reads = {one: reads_a_step(kind, folder, **more) for one, kind in kinds.items()}
        print(
            f"{name:18} theirs {cost['theirs']:6.0f} us, ours {cost['ours']:6.0f} us "
            f"({cost['ours'] / cost['theirs']:.2f}); reads a step: {reads['theirs']:g} and {reads['ours']:g}"
        )


if __name__ == "__main__":
    main()
