"""`eventloop predict`: writes the outputs for a task's eval data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eventloop.cli.arguments import CHANGES, Arguments, Command, CommandOption
from eventloop.cli.model_weights import NOT_STRICT, WEIGHTS, open_trainer, require_eval_data
from eventloop.cli.named_checkpoints import BEST_OPTION
from eventloop.cli.output_files import output_path
from eventloop.cli.printing import write_lines
from eventloop.distributed.process_ends import in_ranks
from eventloop.errors import TaskError, UsageError, a, closest, first_of
from eventloop.trainer import Trainer
from eventloop.training.weight_export import save_tensors

_MOST_SHOWN = 10
COMMAND = Command(
    "predict",
    "Writes the outputs for a task's eval data, in the order of the data.",
    (
        WEIGHTS,
        BEST_OPTION,
        NOT_STRICT,
        *CHANGES,
        CommandOption("out", "FILE.safetensors", "the file (default: predictions.safetensors)"),
        CommandOption("dataloader", "NAME", "only for this eval data loader"),
    ),
)


def run(arguments: Arguments) -> int:
    """Runs the command."""
    if in_ranks():
        raise UsageError(
            f"`eventloop predict` runs in one process, not in {os.environ['WORLD_SIZE']}",
            fix="start it without torchrun",
        )
    out = output_path(arguments, "out") or Path("predictions.safetensors")
    tensors: dict[str, Tensor] = {}
    with open_trainer(arguments, COMMAND, _chosen) as trainer:
        for name, loader in _chosen(trainer, arguments).items():
            tensors |= concatenated(name, trainer.predict(loader))
        save_tensors(tensors, out)
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    write_lines([f"{out}: {first_of(shapes, _MOST_SHOWN)}"])
    return 0


def concatenated(name: str, outputs: Sequence[object]) -> dict[str, Tensor]:
    """Concatenates the outputs of all batches, if their shapes agree after the first dimension.

    Outputs of other shapes get a tensor per batch: `NAME[0]`, `NAME[1]`.

    Args:
        name: the key of outputs that are a tensor; nested outputs get `NAME.logits`, `NAME.0`.
        outputs: the output of each batch; a tensor of shape () counts as shape (1,).

    Raises:
        TaskError: an output is not a tensor.
    """
    batches = [dict(_leaves(name, output)) for output in outputs]
    joined = {}
    for key in dict.fromkeys(key for batch in batches for key in batch):
        tensors = [batch[key] for batch in batches if key in batch]
        rows = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
        shapes = {tuple(tensor.shape[1:]) for tensor in rows}
        if len(rows) == len(batches) and len(shapes) == 1:
            joined[key] = torch.cat(rows)
            continue
        numbered = enumerate(batches)
        joined |= {f"{key}[{idx}]": batch[key] for idx, batch in numbered if key in batch}
    return joined


def _leaves(name: str, output: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield name, output
    elif output is not None:
        for key, value in _children(name, output):
            yield from _leaves(f"{name}.{key}", value)


def _children(name: str, output: object) -> Iterator[tuple[str, object]]:
    if isinstance(output, Mapping):
        return ((str(key), value) for key, value in output.items())
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", range(len(output)))
        return ((str(key), value) for key, value in zip(names, output, strict=True))
    if dataclasses.is_dataclass(output):
        fields = dataclasses.fields(output)
        return ((field.name, getattr(output, field.name)) for field in fields)
    raise TaskError(
        f"the output {name!r} is {a(type(output).__name__)}, which can't be written as a tensor",
        fix="return tensors, or mappings, tuples or dataclasses of tensors: Task(forward=...)",
    )


def _chosen(trainer: Trainer, arguments: Arguments) -> dict[str, object]:
    require_eval_data(trainer, arguments)
    loaders = trainer.state.eval_dataloaders
    name = arguments.given.get("dataloader", "")
    if name and name not in loaders:
        raise UsageError(
            f"no eval data loader is named {name!r}{closest(name, loaders)}",
            fix=f"one of {', '.join(loaders)}",
        )
    return {name: loaders[name]} if name else dict(loaders)
