"""A Trainer that is killed in mid-epoch, started again, and ends where one in one go does.

    python killed.py            a minute on a CPU

It trains a tiny GPT-2 to copy: once with transformers' Trainer, and once with eventloop's loop, in a process
that is killed twice. The losses of both histories, and their weights, are the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from eventloop_transformers import on_eventloop

KILLED_AT = (25, 40)


class Dies(transformers.TrainerCallback):
    """Kills the process at a step, as a machine that is taken away does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Kills it."""
        if state.global_step == self._step:
            os.kill(os.getpid(), 9)


def rows() -> list[dict[str, torch.Tensor]]:
    """Returns halves that repeat."""
    halves = torch.randint(2, 40, (256, 8), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([halves, halves], 1)
    return [{"input_ids": one, "labels": one} for one in tokens]


def train(kind: type, folder: Path, dies_at: int = -1) -> None:
    """Trains, and leaves history and weights in the folder."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=8,
        learning_rate=3e-3,
        logging_steps=8,
        save_steps=30,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = kind(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)),
        args=args,
        train_dataset=rows(),
        callbacks=[Dies(dies_at)],
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    torch.save({"losses": losses, "weights": trainer.model.state_dict()}, folder / "end.pt")


def main() -> None:
    """Compares both."""
    theirs, ours = (Path(tempfile.mkdtemp()) for _ in range(2))
    train(transformers.Trainer, theirs)
    for step in (*KILLED_AT, -1):
        ended = subprocess.run([sys.executable, __file__, str(ours), str(step)])
        print("killed" if ended.returncode else "done", f"after {max(step, 0) or 'all'} steps")
    one, other = (torch.load(folder / "end.pt") for folder in (theirs, ours))
    equal = all(
        torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"]
    )
    print(
        f"losses {one['losses'][0]:.3f} to {one['losses'][-1]:.3f}; the same: {one['losses'] == other['losses']}"
    )
    print(f"weights; the same bits: {equal}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        where = Path(sys.argv[1])
        on_loop = on_eventloop(
            transformers.Trainer, run_dir=where / "run", checkpoint_interval="10ba"
        )
        train(on_loop, where, int(sys.argv[2]))
    else:
        main()
