"""Trains until it is over, in a process that may be killed: python hf_killed.py WHAT FOLDER LOOP."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import torch
import transformers
from hf_cases import SAVES, Noisy, Stream, trained

from eventloop_transformers import on_eventloop

TRL = {"gradient_accumulation_steps": 2, "num_train_epochs": 4, "logging_steps": 3}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {
        **SAVES, "save_total_limit": 2, "num_train_epochs": 6, "data": lambda: Noisy(30),
        "gradient_accumulation_steps": 2, "logging_steps": 4,
    },
    "stream": {"data": lambda: Stream(30), "max_steps": 60, "logging_steps": 7},
    "SFT": TRL,
    "DPO": {**TRL, "sync_ref_model": True, "ref_model_sync_steps": 3},
    "GRPO": TRL,
}  # fmt: skip


def killing(kind: type, at: int) -> type:
    """Returns a trainer whose process is killed at a call of `training_step`."""
    calls = 0

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return kind.training_step(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"training_step": training_step})


def main(what: str, folder: Path, loop: str) -> None:
    """Trains in the folder, and leaves what there is to compare in it."""
    transformers.utils.logging.set_verbosity_error()

    def on(kind: type) -> type:
        if loop == "theirs":
            return kind
        return on_eventloop(kind, run_dir=folder / "run", checkpoint_interval="2ba")

    os.chdir(folder)
    if what in ("plain", "stream"):
        found = trained(on(transformers.Trainer), "out", **KINDS[what])
    else:
        from trl_cases import trl_trained

        found = trl_trained(what, on, "out", **KINDS[what])
    torch.save({**found, "calls": found["calls"][-1]}, folder / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
