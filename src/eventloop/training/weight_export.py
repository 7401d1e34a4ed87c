"""Exports weights to a safetensors file, and prepares weights for models with their own loading code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

# Private: its loading adds entries that old checkpoints lack, and otherwise copies (torch 2.13).
from torch.nn.modules.batchnorm import _NormBase

from eventloop.errors import EventloopError, NonFiniteError
from eventloop.files.file_modes import apply_umask
from eventloop.files.run_folder import why_no_file
from eventloop.naming import uncompiled_name
from eventloop.training.sharded_tensors import gathered
from eventloop.training.tensor_slices import TensorSlice, held
from eventloop.training.weight_checks import first_not_finite, trained_names

if TYPE_CHECKING:
    from eventloop.state import State

_PLAIN = (Tensor, nn.Parameter)
# torch's own loading code, which only copies the entries of a tensor.
_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def fit_to_load(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Returns weights that `model.load_state_dict` accepts.

    Checkpoints provide tensors that are read from the file when they are copied. For modules with
    their own loading code or a loading hook, they are replaced by plain tensors, since that code may
    keep them, assign them to `.data`, or convert them to arrays.
    """
    prefixes = tuple(loaded_by_own_code(model))
    plain_tensors = {}
    for name, value in weights.items():
        is_plain = not isinstance(value, Tensor) or type(value) in _PLAIN
        if not is_plain and name.startswith(prefixes):
            # `detach` reads the tensor; a subclass may only wrap the tensor of the file.
            plain_tensors[name] = value.detach()
    return {**weights, **plain_tensors} if plain_tensors else weights


def loaded_by_own_code(model: nn.Module) -> Iterator[str]:
    """Yields the name prefixes of modules that don't load their weights with torch's code."""
    if getattr(model.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        yield ""
    for name, module in model.named_modules(remove_duplicate=False):
        load = getattr(module._load_from_state_dict, "__func__", None)
        # Private: torch has no public access to the hooks (torch 2.13).
        if load not in _COPYING or module._load_state_dict_pre_hooks:
            yield f"{name}." if name else ""


# Other programs choose the format of a file by its suffix.
_OTHER_FORMATS = {
    ".bin": "a file for torch.load",
    ".ckpt": "a checkpoint",
    ".onnx": "an ONNX model",
    ".pt": "a file for torch.load",
    ".pt2": "a file of torch.export",
    ".pth": "a file for torch.load",
}
_WITH_EXPORT = "; the plugin eventloop-export writes this format"


def export(state: State, weights: Mapping[str, Tensor], path: Path) -> Path:
    """Writes the whole weights of a run to a safetensors file. Collective: every rank must call it.

    Names are those of the model before `torch.compile`.

    Raises:
        EventloopError: the file's suffix is that of another format, or the file can't be written.
        NonFiniteError: a weight isn't finite.
    """
    if path.suffix in _OTHER_FORMATS:
        raise EventloopError(
            f"weights are written as .safetensors, but {path.name!r} is named as {_OTHER_FORMATS[path.suffix]}",
            fix=f"write export({path.with_suffix('.safetensors').name!r}); safetensors.torch.load_file reads it"
            f"{_WITH_EXPORT if path.suffix in ('.onnx', '.pt2') else ''}",
        )
    weights = {uncompiled_name(name): tensor for name, tensor in weights.items()}
    extra_names = [
        name for name, value in weights.items() if not isinstance(value, Tensor | TensorSlice)
    ]
    if extra_names:
        weights = {name: tensor for name, tensor in weights.items() if name not in extra_names}
        if state.rank == 0:
            warnings.warn(
                f"not exported, because they aren't tensors: {', '.join(extra_names)}", stacklevel=2
            )
    _require_finite(state, weights)
    whole_tensors = gathered(weights, state.all_gather, keep=state.rank == 0)
    return save_tensors(whole_tensors, path) if state.rank == 0 else path


def _require_finite(state: State, weights: Mapping[str, Tensor]) -> None:
    """Raises NonFiniteError if a parameter isn't finite; only warns with `on_bad_loss="ignore"`.

    Collective: every rank must call it.
    """
    trained = {uncompiled_name(name) for name in trained_names(state.model)}
    local_name = first_not_finite(held(weights), trained)
    names = [name for name in state.all_gather(local_name) if name is not None]
    if not names:
        return
    name = names[0]
    error = NonFiniteError(
        f"the weights aren't exported: {name!r} isn't finite",
        fix="export an earlier checkpoint, `eventloop export CHECKPOINT FILE.safetensors`, or set "
        'on_bad_loss="ignore" to export them anyway',
    )
    if state.settings.on_bad_loss == "raise":
        raise error
    if state.rank == 0:
        warnings.warn(f"the exported weights aren't finite: {name!r} is the first", stacklevel=2)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Writes tensors by name to a safetensors file; returns its path.

    Raises:
        EventloopError: the file can't be written.
    """
    reason = why_no_file(path)
    if not reason:
        # Clones, because safetensors refuses tensors that share memory, such as tied weights.
        copies = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(copies, path, metadata={"format": "pt"})  # transformers requires this entry
            apply_umask(path)
        except (OSError, SafetensorError) as error:
            reason = str(error)
    if reason:
        raise EventloopError(
            f"the tensors can't be written to {str(path)!r}: {reason}",
            fix="choose another file, for example `model.safetensors`, or free disk space",
        )
    return path
