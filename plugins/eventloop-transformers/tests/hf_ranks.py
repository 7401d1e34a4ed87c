"""Trains with both loops as one of several ranks: torchrun hf_ranks.py FOLDER; each writes what differs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import transformers
from hf_cases import SAVES, Noisy, Stream, differing, trained

import eventloop_transformers
from eventloop_transformers import on_eventloop

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, accumulation": {"bf16": True, "gradient_accumulation_steps": 4},
    "own tokens": {"gradient_accumulation_steps": 3, "average_tokens_across_devices": False},
    "the best": {**SAVES, "load_best_model_at_end": True},
    "a stream": {"data": lambda: Stream(15), "max_steps": 6, "gradient_accumulation_steps": 2},
}  # fmt: skip


class Killed(BaseException):
    """The end of a process, as far as this one can have it."""


class Dies(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


def main(folder: Path) -> None:
    """Compares, case by case."""
    transformers.utils.logging.set_verbosity_error()
    found = {name: compared(folder / name, case) for name, case in CASES.items()}
    found["resumed"] = resumed(folder / "resumed")
    rank = os.environ["RANK"]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def compared(folder: Path, case: dict[str, Any]) -> list[str]:
    results = []
    for kind in (transformers.Trainer, eventloop_transformers.Trainer):
        enter(folder / kind.__module__)
        results.append(trained(kind, "out", ddp_backend="gloo", **case))
    return differing(*results)


def resumed(folder: Path) -> list[str]:
    """Has a run die on all ranks, and go on."""
    case = {"data": lambda: Noisy(26), "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    enter(folder / "theirs")
    whole = trained(transformers.Trainer, "out", **case)
    enter(folder / "ours")
    kind = on_eventloop(transformers.Trainer, run_dir=folder / "run", checkpoint_interval="2ba")
    for step in (3, 5):
        try:
            trained(kind, "out", **case, callbacks=(lambda step=step: Dies(step),))
        except Killed:
            continue
    last = trained(kind, "out", **case)
    return differing({**whole, "calls": 0}, {**last, "calls": 0})


def enter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
