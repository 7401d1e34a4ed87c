"""Trains workloads with one trainer, in a process of its own.

    python benchmarks/trainers/worker.py MODULE < REQUESTS

Each line of the input is a JSON object: the arguments of `step_time` or of `trained_weights`. Each gets a
line with the result, after the word RESULT, since trainers print lines of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workload import BATCH_SIZE, MODELS, Images, StepClock, Workload

WARM_UP_STEPS = 20
Train = Callable[[Workload], nn.Module]


def step_time(train: Train, model: str, num_steps: int) -> float:
    """Returns the mean time of a training step in seconds, without the first steps."""
    times: list[float] = []
    workload = Workload(
        build_model=lambda: StepClock(MODELS[model](), times),
        dataset=Images((num_steps + WARM_UP_STEPS) * BATCH_SIZE),
        num_epochs=1,
    )
    train(workload)
    return (times[-1] - times[WARM_UP_STEPS]) / (len(times) - 1 - WARM_UP_STEPS)


def trained_weights(
    train: Train,
    folder: str,
    steps_per_epoch: int,
    num_epochs: int,
    augments: bool,
    kill_at_step: int | None,
) -> str:
    """Trains the perceptron with checkpoints, or resumes its run; returns a digest of the weights.

    Args:
        train: the trainer.
        folder: for the checkpoints, and a file that counts the samples that were read.
        steps_per_epoch: steps in an epoch.
        num_epochs: epochs of the run.
        augments: whether reading a sample draws noise.
        kill_at_step: the step whose data are being read when the process is killed; None: not killed.
    """
    path = Path(folder)
    path.mkdir(exist_ok=True)
    with Path(folder + ".reads").open("ab", buffering=0) as reads:
        kill_at = None if kill_at_step is None else (kill_at_step - 1) * BATCH_SIZE + 1
        dataset = Images(steps_per_epoch * BATCH_SIZE, augments, reads.fileno(), kill_at)
        model = train(Workload(MODELS["perceptron"], dataset, num_epochs, folder))
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def import_trainer(module: str) -> Any:
    """Imports the module of a trainer."""
    # A torchvision for CUDA can't be imported beside a torch for the CPU, unless somebody declares its
    # operators. Composer, Lightning and transformers import torchvision.
    with contextlib.suppress(ImportError):
        from eventloop_composer.importing import declare_operators

        declare_operators()
    return importlib.import_module(module)


def main() -> None:
    """Answers requests until the input ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    trainer = import_trainer(sys.argv[1])
    print("RESULT", json.dumps({"version": str(trainer.VERSION)}), flush=True)
    functions = {function.__name__: function for function in (step_time, trained_weights)}
    for line in sys.stdin:
        request = json.loads(line)
        function: Any = functions[request.pop("function")]
        print("\nRESULT", json.dumps(function(trainer.train, **request)), flush=True)


if __name__ == "__main__":
    main()
