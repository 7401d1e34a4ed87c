"""A model with example inputs as a file; works without a training."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

# Private, but what torch.export's own documentation maps nested inputs with (torch 2.13).
from torch.utils._pytree import tree_map

_TARGETS = ("labels", "label", "targets")


def program_of(model: nn.Module, inputs: Any) -> ExportedProgram:
    """Traces a model in evaluation mode, on the CPU, with any number of samples.

    Args:
        model: stays as it is; a copy is traced.
        inputs: what it is called with: two samples or more, of one argument, or a mapping of
            arguments by name. Of a mapping, labels and what the model doesn't take are left out.

    Raises:
        Whatever torch raises for a model that it can't trace.
    """
    traced = copy.deepcopy(model).cpu().eval()
    args, kwargs = _arguments(traced, tree_map(_on_cpu, inputs))
    dynamic = tree_map(lambda one: {0: Dim.AUTO} if isinstance(one, Tensor) and one.dim() else None,
                       (*args, *kwargs.values()))  # fmt: skip
    names = list(inspect.signature(traced.forward).parameters)
    shapes = dict(zip([*names[: len(args)], *kwargs], dynamic, strict=True))
    with torch.no_grad():
        return torch.export.export(traced, args, kwargs, dynamic_shapes=shapes)


def save_program(model: nn.Module, inputs: Any, path: Path) -> None:
    """Writes a model for `torch.export.load`, which needs none of its Python code."""
    _replaced(path, lambda new: torch.export.save(program_of(model, inputs), new))


def save_onnx(model: nn.Module, inputs: Any, path: Path) -> None:
    """Writes a model as ONNX, through torch's exporter, weights included."""
    with warnings.catch_warnings():
        # Its exporter uses what torch has deprecated (torch 2.13).
        warnings.simplefilter("ignore", FutureWarning)
        exported = program_of(model, inputs)
        program = torch.onnx.export(
            exported, dynamo=True, verbose=False, dynamic_shapes=_axis_names(exported)
        )
    assert program is not None
    _replaced(path, lambda new: program.save(new, external_data=False))


def _arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(inputs, Mapping):
        return (inputs,), {}
    parameters = inspect.signature(model.forward).parameters
    return (), {
        name: one for name, one in inputs.items() if name in parameters and name not in _TARGETS
    }


def _axis_names(program: ExportedProgram) -> tuple[dict[int, str] | None, ...] | None:
    """Returns a name for the first axis of each input, "batch" for that of the samples; None if all are fixed.

    Inputs whose first axes may differ in length have different names, as tracing found them.
    """
    symbols: set[str] = set()
    axes: list[dict[int, str] | None] = []
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        shape: Sequence[Any] = getattr(node.meta.get("val"), "shape", ())
        is_fixed = not len(shape) or isinstance(shape[0], int)
        if (
            is_fixed or str(shape[0]) in symbols
        ):  # torch names equal axes alike, and warns of a second name
            axes.append(None)
            continue
        axes.append({0: f"{node.name}_batch" if symbols else "batch"})
        symbols.add(str(shape[0]))
    return tuple(axes) if symbols else None


def _on_cpu(one: Any) -> Any:
    return one.detach().cpu() if isinstance(one, Tensor) else one


def _replaced(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file as a whole: a kill leaves the one before or the new one."""
    new = path.with_name(f".new-{path.name}")
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
