"""The plugin: which file is written for which name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from torch import nn

from eventloop import EventloopError, PluginError, State, hookimpl
from eventloop.toolbox import apply_umask, gathered, inputs_of, is_pair, sharded, slice_of
from eventloop_export.formats import save_onnx, save_program


class Export:
    """Exports to the format that the file name implies: .onnx, .pt2, or a save_pretrained folder.

    Weights are those that evaluation sees, an average's, say; .safetensors is left to the core.
    """

    @hookimpl(conditional=True)
    def export(self, state: State, path: Path) -> Path | None:
        """Writes the model, on the first rank.

        Raises:
            EventloopError: the model can't be exported so.
        """
        kind = path.suffix
        if kind not in (".onnx", ".pt2", ""):
            return None
        weights = _whole_weights(state, path)
        if state.rank:
            return path
        if kind == ".onnx":
            _require_onnx(path)
        try:
            if not kind:
                _save_pretrained(state.model, path, weights)
            else:
                save = save_onnx if kind == ".onnx" else save_program
                save(state.model, _example(state), path)
        except EventloopError:
            raise
        except Exception as error:  # whatever torch raises for code that it can't trace
            what = next(iter(str(error).splitlines()), "")
            raise EventloopError(
                f"the model can't be exported to {str(path)!r}: {type(error).__name__}: {what}",
                fix="see https://pytorch.org/docs/stable/export.html for what can be traced, or export "
                "the weights alone, `model.safetensors`",
            ) from error
        return path


def _require_onnx(path: Path) -> None:
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise PluginError(
                f"{str(path)!r} needs {name}, which isn't installed",
                fix='`pip install "eventloop-export[onnx]"`, or export to `model.pt2`',
            )


def _whole_weights(state: State, path: Path) -> dict[str, Any] | None:
    """Returns the whole weights of a model that is sharded, on the first rank; None of any other.

    Every rank must call it.

    Raises:
        EventloopError: it is to be traced, for which it would have to be whole.
    """
    if all(sharded(one) is None for one in state.model.parameters()):
        return None
    if path.suffix:
        raise EventloopError(
            f"a sharded model can't be traced for {str(path)!r}",
            fix="export a folder or `model.safetensors`, load it into the model in one process, and "
            "export that",
        )
    slices = {name: slice_of(value) for name, value in state.model.state_dict().items()}
    return gathered(slices, state.all_gather, keep=state.rank == 0)


def _save_pretrained(model: nn.Module, path: Path, weights: dict[str, Any] | None) -> None:
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise EventloopError(
            f"{type(model).__name__} has no save_pretrained, which would write the folder {str(path)!r}",
            fix="export to a file: `model.onnx`, `model.pt2` or `model.safetensors`",
        )
    save(path, **({} if weights is None else {"state_dict": weights}))
    apply_umask(path)


def _example(state: State) -> Any:
    """Returns the inputs of a batch: of an eval set, or else of the training data."""
    loaders = [*state.eval_dataloaders.values(), state.train_dataloader]
    batch = next(iter(next(one for one in loaders if one is not None)))
    return inputs_of(batch) if is_pair(batch) else batch
