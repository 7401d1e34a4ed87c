"""Writes a checkpoint as a folder of save_pretrained, without touching the trained model; free of hooks."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventloop.toolbox import apply_umask, kept_generators, weights_at

# Prefixes of incomplete folders, which a kill may leave behind.
_NEW = ".new-"
_LINKED = ".of-"
# Written last: transformers doesn't load a folder without it, so an incomplete folder is never loaded.
CONFIG = "config.json"


@dataclass(frozen=True)
class Pretrained:
    """The contents of a folder apart from its weights: configuration, names of weights, tokenizer.

    Args:
        model: a model of the trained class on the meta device, for its configuration and the names
            under which `save_pretrained` writes weights.
        tokenizer: any object with `save_pretrained`; None for none.
        max_shard_size: maximum size of a file of weights: "5GB".
    """

    model: nn.Module
    tokenizer: Any = None
    max_shard_size: str = "5GB"

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any, max_shard_size: str) -> Pretrained:
        """Copies the configuration of a model, without its weights.

        Raises:
            TypeError: the model isn't a model of transformers.
        """
        from transformers import PreTrainedModel

        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"{type(model).__name__} isn't a model of transformers")
        with kept_generators(), torch.device("meta"):
            meta_model = type(model)(copy.deepcopy(model.config)).to(model.dtype)
        meta_model.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
        return cls(meta_model, tokenizer, max_shard_size)


def write_folder(checkpoint: Path, target: Path, pretrained: Pretrained) -> None:
    """Writes the weights of a checkpoint as a folder of save_pretrained, atomically.

    An existing folder is replaced. A kill leaves the old folder or the new folder, and possibly a
    folder that begins with `.new-`.

    Args:
        checkpoint: the folder of a checkpoint or of a run, or a file of weights.
    """
    new_folder = target.with_name(_NEW + target.name)
    shutil.rmtree(new_folder, ignore_errors=True)
    save: Any = pretrained.model.save_pretrained
    weights = _named_as_in(pretrained.model, weights_at(checkpoint))
    with _without_bars():
        save(new_folder, state_dict=weights, max_shard_size=pretrained.max_shard_size)
    if pretrained.tokenizer is not None:
        pretrained.tokenizer.save_pretrained(new_folder)
    apply_umask(new_folder)
    if target.exists():
        shutil.rmtree(target)
    new_folder.rename(target)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Disables progress bars of transformers: they would break the training's progress bar."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _named_as_in(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights under the names of the model's state dict; tied weights share memory, as in the model.

    Raises:
        ValueError: a weight of the model is missing, as in a checkpoint of adapters only.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    params |= model.state_dict(keep_vars=True)
    # A checkpoint stores tied parameters once, under one of their names.
    by_param = {id(params[name]): weight for name, weight in weights.items() if name in params}
    named = {name: by_param[id(param)] for name, param in params.items() if id(param) in by_param}
    missing = [name for name in model.state_dict() if name not in named]
    if missing:
        raise ValueError(f"the checkpoint has no {missing[0]!r}, and lacks {len(missing)} weights")
    return {name: named[name] for name in model.state_dict()}


def linked(checkpoint: Path, folder: Path) -> Path:
    """Copies a checkpoint's folder, so that it survives the removal of the checkpoint.

    It takes no space where the file system has hard links.
    """
    target = folder / (_LINKED + checkpoint.name)
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, target, copy_function=os.link)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(checkpoint, target)
    return target


def remove_leftovers(folder: Path) -> None:
    """Removes incomplete folders of a process that was killed."""
    for prefix in (_NEW, _LINKED):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def whole_folders(folder: Path) -> list[Path]:
    """Returns the folders that are whole, the oldest first."""
    return sorted(path for path in folder.glob("ba*") if (path / CONFIG).is_file())


def batch_of(path: Path) -> int:
    """Returns the batch in the name of a checkpoint or a folder, `ba00000012`."""
    return int(path.name.removeprefix("ba").partition(".")[0])
