"""A model's adapters: their names, and how they are made, saved and read by peft; free of hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from eventloop import EventloopError, TaskError
from eventloop.toolbox import SavedTensor, apply_umask, counted, saved_weights_at

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_NAMED = 3


def adapters_of(model: nn.Module) -> list[str]:
    """Returns the names of a model's adapters; none where peft hasn't made it."""
    found = getattr(model, "peft_config", None)
    return [*found] if isinstance(found, Mapping) else []


def with_adapter(model: nn.Module, name: str, config: Any) -> nn.Module:
    """Returns a model with one more adapter, which alone is trained; the base is changed in place.

    Raises:
        ValueError: peft finds nothing that it could adapt.
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
    """Returns the names that an adapter's weights have in peft's files, by those in the model."""
    import peft

    own = model.state_dict()
    names = {id(one): name for name, one in own.items()}
    # A table of the embedding that was resized is trained, and so in `modules_to_save`.
    found = peft.get_peft_model_state_dict(
        model, own, adapter_name=adapter, save_embedding_layers=False
    )
    return {names[id(one)]: name for name, one in found.items()}


def names_to_save(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the names of adapters, of what else is trained, and of buffers."""
    named = model.named_parameters(remove_duplicate=False)
    wanted = {name for name, one in named if one.requires_grad}
    wanted |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for adapter in adapters_of(model):
        wanted |= saved_names(model, adapter).keys()
    return [name for name in names if name in wanted]


def folders_of(model: nn.Module, path: Path) -> dict[str, Path]:
    """Returns the folder of each adapter that a folder of peft's has, by the name in the model.

    The folder itself is that of the adapter `default`, or of the one that is trained; others are in
    it under their names. The file of its weights stands for the folder.
    """
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file():
        path = path.parent
    names = adapters_of(model)
    found = {name: path / name for name in names if (path / name / CONFIG).is_file()}
    if names and (path / CONFIG).is_file():
        active = getattr(model, "active_adapter", names[0])
        found["default" if "default" in names else str(active)] = path
    return found


def read_adapter(model: nn.Module, adapter: str, folder: Path) -> dict[str, SavedTensor]:
    """Returns the weights of an adapter by their names in the model; loaded lazily.

    Raises:
        TaskError: the file is missing, or isn't that of such an adapter.
    """
    if not (folder / WEIGHTS).exists():
        raise TaskError(
            f"{folder} has no {WEIGHTS}", fix="save the adapter with safe_serialization=True"
        )
    saved = saved_weights_at(folder / WEIGHTS)
    names = saved_names(model, adapter)
    own = model.state_dict()
    missing = [there for there in names.values() if there not in saved]
    unexpected = [there for there in saved if there not in names.values()]
    shapes = [
        f"{there} is {tuple(saved[there].shape)}, not {tuple(own[name].shape)}"
        for name, there in names.items()
        if there in saved and tuple(saved[there].shape) != tuple(own[name].shape)
    ]
    problems = [
        f"{counted(len(found), 'weight')} {what}: {', '.join(found[:_MOST_NAMED])}"
        for what, found in (
            ("missing", missing),
            ("that the model lacks", unexpected),
            ("of other shapes", shapes),
        )
        if found
    ]
    if problems:
        raise TaskError(
            f"the adapter in {folder} isn't the model's {adapter!r}: {'; '.join(problems)}",
            fix=f"give the model the adapter that {CONFIG} says: {_described(folder)}",
        )
    return {name: saved[there] for name, there in names.items()}


def save_folder(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes all adapters as peft does: `default` into the folder, others into folders in it.

    Args:
        weights: whole, by their names in the model.
    """
    save: Any = model.save_pretrained
    save(path, state_dict=dict(weights), save_embedding_layers=False)
    apply_umask(path)


def merged(model: nn.Module) -> nn.Module:
    """Returns a copy on the host, with what the active adapters add in its weights, and no adapter."""
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
    """Returns the options of an adapter's file that decide its shapes."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    names = ("r", "target_modules", "modules_to_save", "use_dora")
    values = {name: getattr(config, name, None) for name in names}
    shown = (
        f"{name}={sorted(one) if isinstance(one, set) else one}"
        for name, one in values.items()
        if one
    )
    return ", ".join(shown) or str(config.peft_type)
