"""Exports the weights of a checkpoint to a file, without torch, and finds weights for a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.checkpoint.locations import FOLDER, checkpoint_at
from eventloop.checkpoint.manifest import LEFT_OUT, MANIFEST
from eventloop.checkpoint.safetensors_files import MAX_HEADER_ITEMS, NewTensors, read_header
from eventloop.checkpoint.saved_tensors import SavedTensor, TensorFiles, read_all, saved_tensors
from eventloop.checkpoint.verifying import (
    checked_manifest,
    opened,
    put_together,
    refusing,
    refusing_file,
    require_part,
    why_passed_over,
)
from eventloop.errors import CheckpointError, EventloopError, TaskError, counted, first_of
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.fixes import distribution_of
from eventloop.naming import uncompiled_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from eventloop.checkpoint.manifest import Manifest

PART = "model"
STATES = "plugins"
_SINGLE = "model.safetensors"  # transformers' name for the file of weights
_INDEX = f"{_SINGLE}.index.json"  # transformers' name for the index of several files
_ADAPTERS = "adapter_config.json"  # peft's name


def export_weights(checkpoint: Path, path: Path) -> tuple[list[str], list[str]]:
    """Copies the weights of a checkpoint to a safetensors file, atomically.

    Args:
        checkpoint: the folder of the checkpoint.
        path: the file to write; an existing file is replaced.

    Returns:
        The names of the tensors, and the paths of the model's other values, which are left out.

    Raises:
        CheckpointError: the weights are damaged, incomplete, or not finite.
        EventloopError: the file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with refusing(checkpoint, "the weights of the checkpoint"):
            manifest = checked_manifest(checkpoint)
            if LEFT_OUT in manifest.known:
                raise CheckpointError(
                    f"{checkpoint.name} isn't exported: it leaves out the weights that the task builds",
                    fix="export the run's model: `eventloop fit TASK --run-dir RUN --export MANIFEST`",
                )
            if reason := why_passed_over(manifest.known):
                raise CheckpointError(
                    f"{checkpoint.name} isn't exported: {reason}",
                    fix="export an earlier checkpoint; to inspect these weights, open "
                    f"{str(checkpoint / f'{PART}.safetensors')!r}",
                )
            names = _copy(checkpoint, manifest, temporary)
            left_out_paths = _others(checkpoint, manifest, names)
        temporary.replace(path)
        disk.sync_folder(path.parent)
    except OSError as error:
        raise EventloopError(
            f"the weights can't be written to {str(path)!r}: {error.strerror}",
            fix="name another file, or free space",
        ) from error
    finally:
        with suppress(FileNotFoundError):
            disk.remove_file(temporary)
    return [uncompiled_name(name) for name in names], left_out_paths


def _copy(checkpoint: Path, manifest: Manifest, path: Path) -> list[str]:
    """Copies the file of the tensors and returns their names in the checkpoint."""
    name = manifest.parts.get(PART, {}).get(".safetensors")
    if PART in manifest.shards or _has_compiled_names(checkpoint, manifest):
        return _put_together(checkpoint, manifest, path)
    if name is None:
        raise CorruptFileError(
            f"it has no tensors in a part {PART!r}, only {', '.join(manifest.parts)}"
        )
    with opened(checkpoint, name, manifest) as file, disk.NewFile(path) as copy:
        while file.num_left:
            copy.write(file.read(min(disk.CHUNK_BYTES, file.num_left)))
    with disk.OldFile(path) as written:
        return list(read_header(written))


def _has_compiled_names(checkpoint: Path, manifest: Manifest) -> bool:
    """Returns whether tensors have names of a compiled model; the file can't be copied then."""
    file_name = manifest.parts.get(PART, {}).get(".safetensors")
    if file_name is None:
        return False
    with disk.OldFile(checkpoint / file_name) as file:  # only the header, which needs no torch
        return any(uncompiled_name(name) != name for name in read_header(file))


def _put_together(checkpoint: Path, manifest: Manifest, path: Path) -> list[str]:
    """Writes whole tensors, one at a time, putting slices together; returns their saved names."""
    require_part(checkpoint, PART, manifest)
    tensors = saved_tensors(checkpoint, PART, manifest)
    saved = {uncompiled_name(tensor): value for tensor, value in tensors.items()}
    draft = NewTensors(saved, path.name, read=SavedTensor.read)
    with disk.NewFile(path) as file:
        draft.write(file)
    return list(tensors)


def _others(checkpoint: Path, manifest: Manifest, names: list[str]) -> list[str]:
    """Returns the paths of the values that aren't tensors."""
    tensor = object()
    nest = put_together(checkpoint, PART, manifest, dict.fromkeys(names, tensor))
    return [path for path, value in _leaves("", nest) if value is not tensor]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    branches: Any = ()
    if isinstance(value, Mapping):
        branches = value.items()
    elif isinstance(value, list | tuple):
        branches = enumerate(value)
    else:
        yield path, value
    for key, value_of_key in branches:
        yield from _leaves(f"{path}.{key}" if path else str(key), value_of_key)


def weights_at(path: str | Path) -> dict[str, Tensor]:
    """Loads weights to the host; arguments and errors are those of `saved_weights_at`."""
    return read_all(saved_weights_at(path))  # type: ignore[no-any-return]


def saved_weights_at(path: str | Path) -> dict[str, SavedTensor]:
    """Returns weights that load lazily from their files.

    Args:
        path: a safetensors file; the folder of a pretrained model, with `model.safetensors` and
            `config.json`, or with several files and `model.safetensors.index.json`; a checkpoint; or
            a run, for its newest checkpoint that verifies.

    Raises:
        TaskError: the file doesn't exist, or isn't a safetensors file.
        CheckpointError: the checkpoint doesn't verify, or has no weights.
        UsageError: the folder has no checkpoint.
    """
    return weights_and_states(Path(path))[0]


class FoundWeights(NamedTuple):
    """Weights by name, with the states of plugins that were saved with them.

    Tensors are loaded lazily. A checkpoint's files have been verified.

    Attributes:
        weights: the model's weights.
        states: the plugins' states by folded name.
        left_out: the digest of the weights that the checkpoint leaves out; None if it has all.
    """

    weights: dict[str, Any]
    states: dict[str, Any]
    left_out: str | None = None


def weights_and_states(path: Path, plugins: Collection[str] = ()) -> FoundWeights:
    """Finds weights as `saved_weights_at` does, and the states of plugins saved with them.

    Args:
        path: see `saved_weights_at`.
        plugins: the folded names of the plugins whose states to return, if they saved any.
    """
    from eventloop.checkpoint.checkpoint_files import read_checkpoint, verify_part

    if not path.is_dir():
        return FoundWeights(_in_file(path), {})
    if _is_pretrained(path):
        return FoundWeights(_in_pretrained(path), {})
    if (path / _ADAPTERS).exists():
        raise TaskError(
            f"{path} has adapters for a model, and this model has none",
            fix=f"give it some, with lora of {distribution_of('lora')}: `--lora.r 8`, or Task(algorithms=[Lora(r=8)]) with "
            f"what {_ADAPTERS} says; Lora() loads them into a model that peft has made",
        )
    checkpoint, refused = checkpoint_at(path)
    for checkpoint_refused in refused:
        warnings.warn(
            f"{checkpoint_refused.path} isn't used: {checkpoint_refused.reason}", stacklevel=3
        )
    verify_part(checkpoint, PART)
    content = read_checkpoint(checkpoint, only=[PART], leaving=[PART])
    if not isinstance(weights := content.parts[PART], dict):
        raise CheckpointError(
            f"the weights of the checkpoint {str(checkpoint)!r} aren't tensors by name",
            fix="use another checkpoint",
        )
    left_out = content.facts.get(LEFT_OUT)
    if not plugins or STATES not in content.names:
        return FoundWeights(weights, {}, left_out)
    verify_part(checkpoint, STATES)
    states = read_checkpoint(checkpoint, only=[STATES], leaving=[STATES]).parts[STATES]
    plugin_states = {name: states[name] for name in plugins if name in states}
    return FoundWeights(weights, plugin_states, left_out)


def _in_file(path: Path) -> dict[str, SavedTensor]:
    # The user's own path may be a link, as in Hugging Face's cache; the opened file must not be.
    resolved_path = path.resolve()
    with refusing_file(path):
        return TensorFiles(resolved_path.parent, resolved_path.name, (), None).tensors()


def _is_pretrained(folder: Path) -> bool:
    """Returns whether a folder is a pretrained model: neither a run nor a checkpoint."""
    if any(os.path.lexists(folder / name) for name in (MANIFEST, FOLDER)):
        return False
    has_single_file = (folder / _SINGLE).exists() and (folder / "config.json").exists()
    return has_single_file or (folder / _INDEX).exists()


def _in_pretrained(folder: Path) -> dict[str, SavedTensor]:
    """Returns the weights in a pretrained model's folder; several files need an index."""
    if not (index := folder / _INDEX).exists():
        return _in_file(folder / _SINGLE)
    file_names = _file_names_in(index)
    files = {name: _in_file(folder / name) for name in dict.fromkeys(file_names.values())}
    weights: dict[str, SavedTensor] = {}
    for tensor, name in file_names.items():
        with refusing_file(folder / name):
            if tensor not in files[name]:
                raise CorruptFileError(f"{_INDEX} says that it has {tensor[:80]!r}, but it doesn't")
        weights[tensor] = files[name][tensor]
    return weights


def _file_names_in(index: Path) -> dict[str, str]:
    """Returns the name of the file of each tensor."""
    with refusing_file(index):
        with disk.OldFile(index.resolve()) as file:
            value = disk.from_json(file.read_json(), MAX_HEADER_ITEMS)
        file_names = value.get("weight_map") if isinstance(value, dict) else None
        if isinstance(file_names, dict) and all(
            isinstance(file_name, str) and file_name == Path(file_name).name
            for file_name in file_names.values()
        ):
            return file_names
        raise CorruptFileError("its weight_map doesn't map to names of files in the same folder")


def with_names_of(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights under the names that they have in a model, whether compiled or not.

    `torch.compile` adds `_orig_mod` to the names in a module that it wraps. Other names don't change.
    """
    names = {uncompiled_name(name): name for name in model.state_dict()}
    return {names.get(uncompiled_name(name), name): value for name, value in weights.items()}


def with_tied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Adds entries that a file can't have: other names of tied parameters, and extra states."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    model_state = model.state_dict()
    all_weights = {
        name: model_state[name] for name in model_state if name.endswith("_extra_state")
    } | dict(weights)
    for tied_names in names.values():
        saved_name = next((name for name in tied_names if name in weights), None)
        if saved_name is not None:
            all_weights |= {name: weights[saved_name] for name in tied_names if name not in weights}
    return all_weights


def warn_of_misfits(
    model: Mapping[str, object], weights: Mapping[str, object], path: object
) -> None:
    """Warns about names that only the model or only the weights have.

    Args:
        model: the model's `state_dict`.
        weights: by name.
        path: the name of the weights in messages.

    Raises:
        TaskError: model and weights have no name in common.
    """
    if not model.keys() & weights.keys():
        raise TaskError(
            f"none of the {len(weights)} weights in {path} is one of this model's",
            weights=f"have {_named(weights)}",
            model=f"has {_named(model)}",
            fix="use weights of this model, or of a part of it under the same names",
        )
    missing = [name for name in model if name not in weights]
    unexpected = [name for name in weights if name not in model]
    if missing:
        difference = f"lacks {counted(len(missing), 'weight')} of the model, left as built"
        warnings.warn(f"{path} {difference}: {_named(missing)}", stacklevel=3)
    if unexpected:
        difference = f"has {counted(len(unexpected), 'weight')} that the model lacks, left out"
        warnings.warn(f"{path} {difference}: {_named(unexpected)}", stacklevel=3)


def _named(names: Iterable[str]) -> str:
    """Lists the first names, escaped, because they come from an untrusted file."""
    return first_of(repr(name[:80]) for name in names) or "none"
