"""How many killed runs end as one in one go, under transformers' own resume and under eventloop's.

    python kills.py [KIND ...]

Each run saves every second step, logs every fourth, and is killed by SIGKILL at one of ten calls of
`training_step`. Another process goes on: with `resume_from_checkpoint=True`, or with a `run_dir`. A line
for each kind and loop: kills, runs with equal weights, and those with an equal `log_history` but for times.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from hf_cases import Noisy, Stream, differing, trained
from hf_killed import killing

from eventloop_transformers import on_eventloop

KINDS: dict[str, dict[str, Any]] = {
    "a stream": {"data": lambda: Stream(14), "max_steps": 17, "gradient_accumulation_steps": 2},
    "SFT": {},
    "DPO": {"sync_ref_model": True, "ref_model_sync_steps": 3},
    "GRPO": {"gradient_accumulation_steps": 2},
    "rows": {},
    "data that draw": {"data": lambda: Noisy(14)},
    "early stopping": {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "callbacks": (lambda: transformers.EarlyStoppingCallback(3),), "learning_rate": 0.03,
    },
}  # fmt: skip
COMMON = {"num_train_epochs": 5, "save_strategy": "steps", "save_steps": 2, "logging_steps": 4}
KILLED_AT = range(5, 33, 3)
OF_TRL = ("SFT", "DPO", "GRPO")


def train(what: str, kind: Callable[[type], type], resume: bool | None = None) -> dict[str, Any]:
    """Trains in the current folder, and returns what there is to compare."""
    case = COMMON | KINDS[what]
    if what not in OF_TRL:
        return trained(kind(transformers.Trainer), "out", **case, resume=resume)
    from trl_cases import trl_trained

    return trl_trained(what, kind, "out", **case, resume=resume)


def in_a_process(folder: Path, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns what a call in a process of its own returns; None if that is killed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the trainers print
            os.chdir(folder)
            found = call()
            torch.save({name: found[name] for name in ("weights", "history")}, "ends.pt")
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return None
    if status:
        raise SystemExit("a process has failed")
    ends: dict[str, Any] = torch.load(folder / "ends.pt", weights_only=False)
    return ends


def resumed(what: str, loop: str, at: int) -> dict[str, Any] | None:
    """Returns what a run ends with that was killed; None if it was over before."""
    folder = Path(tempfile.mkdtemp())

    def on(kind: type) -> type:
        return on_eventloop(kind, run_dir=folder / "run") if loop == "eventloop" else kind

    if in_a_process(folder, lambda: train(what, lambda kind: killing(on(kind), at))) is not None:
        return None
    # One that was killed before its first save begins again.
    resume = True if loop == "transformers" and any(folder.glob("out/checkpoint-*")) else None
    return in_a_process(folder, lambda: train(what, on, resume))


def main(kinds: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for what in kinds:
        whole = in_a_process(Path(tempfile.mkdtemp()), partial(train, what, lambda kind: kind))
        assert whole is not None
        for loop in ("transformers", "eventloop"):
            ends = [one for at in KILLED_AT if (one := resumed(what, loop, at)) is not None]
            weights, history = (
                sum(not differing(whole[part], one[part]) for one in ends)
                for part in ("weights", "history")
            )
            print(
                f"{what}, {loop}: {len(ends)} kills, {weights} with its weights, {history} with its history",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
