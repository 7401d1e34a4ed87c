"""How often a step reads from the device, here and with TRL: on the pretend accelerator of eventloop-testing.

    python plugins/eventloop-llm/tools/reads_of_a_step.py

Counted are `item`, `bool`, `tolist`, `.cpu()` and the like between the begins of two steps, with one and with
three microbatches, without what a logged step reads. Prints a table in Markdown.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import reward_cases
import sft_cases
import sft_pairs
import torch
import trl
from accelerate import PartialState
from transformers import TrainerCallback

import eventloop_llm.dpo
import eventloop_llm.reward
import eventloop_llm.sft
from eventloop import hookimpl
from eventloop_testing import counted_waits, isolated_trainer, pretend_device

BATCH = 6
TRAINERS: dict[str, tuple[Any, ...]] = {
    "SFT": (eventloop_llm.sft.task, sft_cases.llama, sft_cases.CHATS[:12], trl.SFTTrainer, trl.SFTConfig),
    "DPO": (eventloop_llm.dpo.task, sft_cases.llama, sft_pairs.CHATS, trl.DPOTrainer, trl.DPOConfig),
    "KTO": (eventloop_llm.dpo.task, sft_cases.llama, sft_pairs.CHATS, trl.KTOTrainer, trl.KTOConfig),
    "reward": (
        eventloop_llm.reward.task, reward_cases.llama, sft_pairs.CHATS, trl.RewardTrainer, trl.RewardConfig,
    ),
}  # fmt: skip


class OurSteps:
    """Notes how many waits there were when each step began."""

    name = "steps"

    def __init__(self, waits: list[Any]) -> None:
        self._waits: list[Any] = waits
        self.at: list[int] = []

    @hookimpl
    def batch_start(self, state: Any) -> None:
        """Called by eventloop."""
        self.at.append(len(self._waits))


class TheirSteps(TrainerCallback):
    """Likewise."""

    def __init__(self, waits: list[Any]) -> None:
        self._waits: list[Any] = waits
        self.at: list[int] = []

    def on_step_begin(self, *args: Any, **given: Any) -> None:
        """Called by transformers."""
        self.at.append(len(self._waits))


def reads_between(waits: list[Any], begins: list[int]) -> int:
    """Returns how many reads the second step has; the first warms up."""
    return sum(not one.how.startswith("copy to") for one in waits[begins[1] : begins[2]])


def ours(kind: str, num: int, device: torch.device, folder: Path) -> int:
    """Counts those of eventloop."""
    make, model, rows, *_ = TRAINERS[kind]
    options: dict[str, Any] = {"loss": "kto"} if kind == "KTO" else {}
    options |= {"tokenizer": sft_cases.tokenizer(), "max_length": 48, "batch_size": BATCH}
    with counted_waits() as waits:
        steps = OurSteps(waits)
        task = make(model, rows, microbatch_size=None if num == 1 else BATCH // num, **options)
        given = {"device": str(device), "max_duration": "4ba", "log_interval": "100ba"}
        with isolated_trainer(folder, task, callbacks=[steps], **given) as trainer:
            trainer.fit()
    return reads_between(waits, steps.at)


def theirs(kind: str, num: int, device: torch.device, folder: Path) -> int:
    """Counts those of TRL."""
    _, model, rows, make, config = TRAINERS[kind]
    if kind == "KTO":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": bool(at % 2)}
            for at, row in enumerate(rows)
        ]
    args = config(
        str(folder), per_device_train_batch_size=BATCH // num, gradient_accumulation_steps=num,
        max_steps=4, logging_steps=100, save_strategy="no", report_to=[], disable_tqdm=True,
        bf16=False, gradient_checkpointing=False, max_length=48, dataloader_pin_memory=False,
    )  # fmt: skip
    args.__dict__["_setup_devices"] = PartialState().device = device  # else it is the CPU
    more = {"ref_model": model()} if kind in ("DPO", "KTO") else {}
    with counted_waits() as waits:
        steps = TheirSteps(waits)
        made = make(
            model=model(), args=args, processing_class=sft_cases.tokenizer(),
            train_dataset=datasets.Dataset.from_list(rows), callbacks=[steps], **more,
        )  # fmt: skip
        assert next(made.model.parameters()).device.type == device.type, (
            "TRL has taken another device"
        )
        made.train()
    return reads_between(waits, steps.at)


def counted(how: Callable[..., int], kind: str, num: int) -> str:
    """Returns a number."""
    said = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as place, pretend_device() as device, said:
        return str(how(kind, num, device, Path(place)))


if __name__ == "__main__":
    print(
        "| reads of a step | eventloop, 1 microbatch | 3 microbatches | TRL, 1 microbatch | 3 microbatches |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name in TRAINERS:
        cells = [counted(how, name, num) for how in (ours, theirs) for num in (1, 3)]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
