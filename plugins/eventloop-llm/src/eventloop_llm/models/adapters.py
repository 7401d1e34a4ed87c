"""A model's adapters: their names, and making, saving and reading them with peft; free of hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from eventloop import EventloopError, TaskError
from eventloop.toolbox import SavedTensor, apply_umask, counted, saved_weights_at

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MOST_NAMED = 3


def adapters_of(model: nn.Module) -> list[str]:
    """Returns the names of a model's adapters; empty if the model isn't wrapped by peft."""
    configs = getattr(model, "peft_config", None)
    return [*configs] if isinstance(configs, Mapping) else []


def with_adapter(model: nn.Module, name: str, config: Any) -> nn.Module:
    """Adds an adapter and freezes everything else; the base model is changed in place.

    Raises:
        ValueError: peft finds no layer to adapt.
    """
    import peft

    untyped: Any = model
    is_adapted = isinstance(model, peft.PeftModel)
    if is_adapted:
        untyped.add_adapter(name, config)
        untyped.set_adapter(name)
        return model
    adapted: nn.Module = peft.get_peft_model(untyped, config, adapter_name=name)
    return adapted


def saved_names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Returns the names of an adapter's weights in peft's files, by their names in the model."""
    import peft

    weights = model.state_dict()
    names = {id(weight): name for name, weight in weights.items()}
    # A resized embedding is trained, so `modules_to_save` saves it already.
    adapter_weights = peft.get_peft_model_state_dict(
        model, weights, adapter_name=adapter, save_embedding_layers=False
    )
    return {names[id(weight)]: name for name, weight in adapter_weights.items()}


def names_to_save(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the names of adapter weights, of all other trained parameters, and of buffers."""
    params = model.named_parameters(remove_duplicate=False)
    selected = {name for name, param in params if param.requires_grad}
    selected |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for adapter in adapters_of(model):
        selected |= saved_names(model, adapter).keys()
    return [name for name in names if name in selected]


def folders_of(model: nn.Module, path: Path) -> dict[str, Path]:
    """Returns the folder of each adapter in a folder written by peft, by the adapter's name in the model.

    The folder itself holds the adapter `default`, or else the active adapter; other adapters have
    subfolders of their names. The path may also name the file of weights in the folder.
    """
    if path.name == ADAPTER_WEIGHTS and (path.parent / ADAPTER_CONFIG).is_file():
        path = path.parent
    names = adapters_of(model)
    folders = {name: path / name for name in names if (path / name / ADAPTER_CONFIG).is_file()}
    if names and (path / ADAPTER_CONFIG).is_file():
        active = getattr(model, "active_adapter", names[0])
        folders["default" if "default" in names else str(active)] = path
    return folders


def read_adapter(model: nn.Module, adapter: str, folder: Path) -> dict[str, SavedTensor]:
    """Returns the weights of an adapter by their names in the model; loaded lazily.

    Raises:
        TaskError: the file is missing, or belongs to a different adapter.
    """
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise TaskError(
            f"{folder} has no {ADAPTER_WEIGHTS}",
            fix="save the adapter with safe_serialization=True",
        )
    saved = saved_weights_at(folder / ADAPTER_WEIGHTS)
    names = saved_names(model, adapter)
    weights = model.state_dict()
    missing = [saved_name for saved_name in names.values() if saved_name not in saved]
    unexpected = [saved_name for saved_name in saved if saved_name not in names.values()]
    shapes = []
    for name, saved_name in names.items():
        if saved_name not in saved:
            continue
        saved_shape = tuple(saved[saved_name].shape)
        shape = tuple(weights[name].shape)
        if saved_shape != shape:
            shapes.append(f"{saved_name} is {saved_shape}, not {shape}")
    problems = [
        f"{counted(len(subjects), 'weight')} {problem}: {', '.join(subjects[:_MOST_NAMED])}"
        for problem, subjects in (
            ("missing", missing),
            ("that the model lacks", unexpected),
            ("of other shapes", shapes),
        )
        if subjects
    ]
    if problems:
        raise TaskError(
            f"the adapter in {folder} isn't the model's {adapter!r}: {'; '.join(problems)}",
            fix=f"give the model the adapter that {ADAPTER_CONFIG} says: {_described(folder)}",
        )
    return {name: saved[saved_name] for name, saved_name in names.items()}


def save_folder(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes all adapters as peft does: `default` into the folder, others into folders in it.

    Args:
        weights: gathered weights, by their names in the model.
    """
    save: Any = model.save_pretrained
    save(path, state_dict=dict(weights), save_embedding_layers=False)
    apply_umask(path)


def merged(model: nn.Module) -> nn.Module:
    """Returns a copy on the host with the active adapters merged into its weights."""
    copied: Any = copy.deepcopy(model).cpu()
    result: nn.Module = copied.merge_and_unload(safe_merge=True)
    return result


def save_merged(model: nn.Module, path: Path) -> None:
    """Writes a folder of the merged model, as `save_pretrained` does.

    Raises:
        EventloopError: the base model isn't one of transformers.
    """
    result: Any = merged(model)
    if not hasattr(result, "save_pretrained"):
        raise EventloopError(
            f"{type(result).__name__} has no save_pretrained, which would write {str(path)!r}",
            fix="export a file, `model.safetensors`",
        )
    result.save_pretrained(path)
    apply_umask(path)


def _described(folder: Path) -> str:
    """Returns the options in an adapter's configuration that determine its shapes."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    names = ("r", "target_modules", "modules_to_save", "use_dora")
    values = {name: getattr(config, name, None) for name in names}
    described = [
        f"{name}={sorted(value) if isinstance(value, set) else value}"
        for name, value in values.items()
        if value
    ]
    return ", ".join(described) or str(config.peft_type)
