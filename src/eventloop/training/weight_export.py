"""The export of weights: refused where they aren't finite, written to a file of safetensors; and loading by a model's own code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private: adds what old ones lacked (torch 2.13)

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
# Of torch's own: they copy entries to where they belong, and do nothing else with a tensor.
_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def fit_to_load(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Returns weights that `model.load_state_dict` can take.

    Tensors that are still to be read are read where a module overrides how it is loaded, or has a hook
    for it: it may keep them, assign them to `.data`, or make arrays of them, as it can with plain ones.
    """
    own = tuple(loaded_by_own_code(model))
    read = {
        name: one.detach()  # a subclass may only wrap another tensor
        for name, one in weights.items()
        if isinstance(one, Tensor) and type(one) not in _PLAIN and name.startswith(own)
    }
    return {**weights, **read} if read else weights


def loaded_by_own_code(model: nn.Module) -> Iterator[str]:
    """Yields the name prefixes of modules whose own code loads their weights."""
    if getattr(model.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        yield ""
    for name, module in model.named_modules(remove_duplicate=False):
        load = getattr(module._load_from_state_dict, "__func__", None)
        # No public name has the hooks (torch 2.13).
        if load not in _COPYING or module._load_state_dict_pre_hooks:
            yield f"{name}." if name else ""


# Others read a file by the end of its name.
_OTHER_FORMATS = {
    ".bin": "one that torch.load reads",
    ".ckpt": "a checkpoint",
    ".onnx": "one of ONNX",
    ".pt": "one that torch.load reads",
    ".pt2": "one of torch.export",
    ".pth": "one that torch.load reads",
}
_WITH_EXPORT = "; eventloop-export, where it is active, writes this format"


def export(state: State, weights: Mapping[str, Tensor], path: Path) -> Path:
    """Writes the weights of a run, whole, to a file of safetensors; collective.

    Names are those of the model before `torch.compile`.

    Raises:
        EventloopError: the file's name says that it has another format, or it can't be written.
        NonFiniteError: a weight isn't finite.
    """
    if path.suffix in _OTHER_FORMATS:
        raise EventloopError(
            f"weights are written as .safetensors, but {path.name!r} is named as {_OTHER_FORMATS[path.suffix]}",
            fix=f"write export({path.with_suffix('.safetensors').name!r}); safetensors.torch.load_file reads it"
            f"{_WITH_EXPORT if path.suffix in ('.onnx', '.pt2') else ''}",
        )
    weights = {uncompiled_name(name): tensor for name, tensor in weights.items()}
    if extra := [
        name for name, one in weights.items() if not isinstance(one, Tensor | TensorSlice)
    ]:
        weights = {name: one for name, one in weights.items() if name not in extra}
        if state.rank == 0:
            warnings.warn(
                f"not exported, for they aren't tensors: {', '.join(extra)}", stacklevel=2
            )
    _require_finite(state, weights)
    whole = gathered(weights, state.all_gather, keep=state.rank == 0)
    return save_tensors(whole, path) if state.rank == 0 else path


def _require_finite(state: State, weights: Mapping[str, Tensor]) -> None:
    """Refuses parameters that aren't finite, or warns of them if `on_bad_loss` is "ignore"; collective."""
    trained = {uncompiled_name(name) for name in trained_names(state.model)}
    mine = first_not_finite(held(weights), trained)
    name = next((one for one in state.all_gather(mine) if one is not None), None)
    if name is None:
        return
    error = NonFiniteError(
        f"the weights aren't exported: {name!r} isn't finite",
        fix="export an earlier checkpoint, `eventloop export CHECKPOINT FILE.safetensors`; with "
        'on_bad_loss="ignore" they are written all the same',
    )
    if state.settings.on_bad_loss == "raise":
        raise error
    if state.rank == 0:
        warnings.warn(f"the exported weights aren't finite: {name!r} is the first", stacklevel=2)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Writes tensors by name to a file of safetensors; raises EventloopError; returns its path."""
    if not (reason := why_no_file(path)):
        copies = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(copies, path, metadata={"format": "pt"})  # which transformers asks for
            apply_umask(path)
        except (OSError, SafetensorError) as error:
            reason = str(error)
    if reason:
        raise EventloopError(
            f"the tensors can't be written to {str(path)!r}: {reason}",
            fix="give another file, `model.safetensors`, say, or free space",
        )
    return path
