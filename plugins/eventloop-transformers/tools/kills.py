"""How many runs that die end as one in one go, under transformers' own resume and under eventloop's.

    python kills.py

Each run saves every second step and dies at another one, then goes on: `resume_from_checkpoint=True`, or a
`run_dir`. A line for each kind: runs, those with equal weights, those with an equal `log_history` but for times.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import transformers
from hf_cases import Noisy, Stream, differing, trained
from test_hf_resumed import Killed, dying

from eventloop_transformers import on_eventloop

KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "data that draw": {"data": lambda: Noisy(14)},
    "a stream": {"data": lambda: Stream(14), "max_steps": 16, "gradient_accumulation_steps": 2},
    "early stopping": {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "callbacks": (lambda: transformers.EarlyStoppingCallback(3),), "learning_rate": 0.03,
    },
}  # fmt: skip
DIES_AT = range(4, 20, 3)


def resumed(loop: str, at: int, case: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what a run ends with that has died; None if it was over before."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    kind: type = transformers.Trainer
    if loop == "eventloop":
        kind = on_eventloop(kind, run_dir=f"{folder}/run")
    with suppress(Killed):
        trained(dying(kind, at), "out", **case)
        return None
    # One that has died before its first save begins again.
    resume = True if loop == "transformers" and any(Path("out").glob("checkpoint-*")) else None
    return trained(kind, "out", **case, resume=resume)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    for name, more in KINDS.items():
        case = {
            "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "logging_steps": 4, **more
        }  # fmt: skip
        os.chdir(tempfile.mkdtemp())
        whole = trained(transformers.Trainer, "out", **case)
        for loop in ("transformers", "eventloop"):
            ends = [one for at in DIES_AT if (one := resumed(loop, at, case)) is not None]
            equal = [
                sum(not differing(whole[part], one[part]) for one in ends)
                for part in ("weights", "history")
            ]
            print(
                f"{name}, {loop}: {len(ends)} runs, {equal[0]} with its weights, {equal[1]} with its history"
            )


if __name__ == "__main__":
    main()
