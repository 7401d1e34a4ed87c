"""The plugin `lora`: when adapters are made, saved, exported and loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eventloop import EventloopError, PluginError, State, hookimpl
from eventloop.toolbox import (
    FoundWeights,
    as_option,
    closest,
    gathered,
    kept_generators,
    one_line,
    sharded,
    slice_of,
)
from eventloop_llm.extras import optional_module
from eventloop_llm.models.adapters import (
    adapters_of,
    folders_of,
    merged,
    names_to_save,
    read_adapter,
    save_folder,
    save_merged,
    saved_names,
    with_adapter,
)


class Lora:
    """Trains low-rank adapters with peft; checkpoints hold the adapters but not the base model.

    Without `r`, the task's model must have adapters already, made by `peft.get_peft_model`, of any kind
    and number.

    Args:
        r: rank of the new adapter.
        target_modules: names of the layers to adapt, or the ends of their names; peft has defaults for
            many models of transformers. ["all-linear"] adapts all linear layers but the head.
        lora_alpha: scale of the adapter's output, divided by the rank.
        lora_dropout: dropout probability of the adapter's inputs.
        use_rslora: whether to divide by the root of the rank instead, Kalajdzievski 2023.
        use_dora: whether to train the magnitude of weights apart from their direction, Liu et al. 2024.
        modules_to_save: names of layers that are trained and saved entirely, such as a new head.
        task_type: peft's name of the task, such as "CAUSAL_LM"; written into the exported folder.
        adapter: the name of the adapter.
        merge: whether an export merges the adapters into the base model's weights: a file, or a folder
            as `save_pretrained` writes it.

    Raises:
        ValueError: an option is set that has no effect without `r`, or has a value that can't be.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
    """

    off_until_named = True
    free_options = ("merge",)

    def __init__(
        self,
        *,
        r: int | None = None,
        target_modules: list[str] | None = None,
        lora_alpha: int = 8,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        modules_to_save: list[str] | None = None,
        task_type: str | None = None,
        adapter: str = "default",
        merge: bool = False,
    ) -> None:
        self.r = r
        self.target_modules = target_modules
        self.lora_alpha = lora_alpha
        self.lora_dropout = lora_dropout
        self.use_rslora = use_rslora
        self.use_dora = use_dora
        self.modules_to_save = modules_to_save
        self.task_type = task_type
        self.adapter = adapter
        self.merge = merge
        self._note = ""
        if r is None and (target_modules or use_rslora or use_dora or modules_to_save):
            raise ValueError(
                "options of an adapter have no effect without r; give one, such as r=8"
            )
        if r is not None and not (isinstance(r, int) and r >= 1):
            raise ValueError(f"r={r!r} is not a rank; give an int of 1 or more, such as r=8")
        if not 0 <= lora_dropout < 1:
            raise ValueError(f"{lora_dropout=} is not a share; give 0 or more, less than 1")
        if not adapter or "." in adapter or "/" in adapter:
            raise ValueError(f"{adapter=} is not a name of an adapter; give a name without . and /")

    @hookimpl(trylast=True)
    def init(self, state: State) -> None:
        """Makes the adapter, without advancing the global random generators."""
        if self.r is not None:
            self._require_new(state.model)
            # The same seed on every rank, so that all ranks start from the same adapter.
            generator = state.generator("lora", alike=True)
            seed = torch.randint(2**31, (1,), generator=generator, device=state.device)
            with kept_generators():
                torch.manual_seed(int(seed))
                state.model = self._adapted(state.model)
        elif not adapters_of(state.model):
            raise PluginError(
                f"lora: {type(state.model).__name__} has no adapters",
                fix="make some,  " + as_option("lora", r=8) + ", or by peft.get_peft_model in the "
                "function that makes the model",
            )
        params = [*state.model.parameters()]
        num_trained = sum(param.numel() for param in params if param.requires_grad)
        num_all = sum(param.numel() for param in params)
        names = ", ".join(adapters_of(state.model))
        self._note = f"{num_trained:,} of {num_all:,} parameters are trained; adapters: {names}"

    @hookimpl
    def header_note(self) -> str:
        """Returns the number of trained parameters, and the adapters' names."""
        return self._note

    @hookimpl
    def select_weights(self, state: State, names: Sequence[str]) -> list[str]:
        """Returns the names of adapter weights, of all other trained parameters, and of buffers."""
        return names_to_save(state.model, names)

    @hookimpl(conditional=True)
    def read_weights(self, state: State, path: Path, plugins: Sequence[str]) -> FoundWeights | None:
        """Reads adapters from a folder written by peft; the base model's weights stay unchanged."""
        folders = folders_of(state.model, path)
        if not folders:
            return None
        weights = dict(state.model.state_dict())
        for adapter, folder in folders.items():
            weights |= read_adapter(state.model, adapter, folder)
        return FoundWeights(weights, {})

    @hookimpl(conditional=True, tryfirst=True)
    def export(self, state: State, path: Path) -> Path | None:
        """Writes the adapters to a path without a suffix, or merged weights with `merge`."""
        is_sharded = any(sharded(param) is not None for param in state.model.parameters())
        if not path.suffix and not self.merge:
            weights = state.model.state_dict()
            slices = {
                name: slice_of(weights[name])
                for adapter in adapters_of(state.model)
                for name in saved_names(state.model, adapter)
            }
            gathered_weights = gathered(slices, state.all_gather, keep=state.rank == 0)
            if state.rank == 0:
                save_folder(state.model, gathered_weights, path)
            return path
        if not self.merge or path.suffix not in ("", ".safetensors"):
            return None
        if is_sharded:
            raise EventloopError(
                f"the adapters of a sharded model can't be merged for {str(path)!r}",
                fix="export a folder, load it in one process with load_weights, and export that",
            )
        if state.rank == 0:
            _save(merged(state.model), path) if path.suffix else save_merged(state.model, path)
        return path

    def _require_new(self, model: nn.Module) -> None:
        if self.adapter in adapters_of(model):
            raise PluginError(
                f"lora: the model has an adapter {self.adapter!r} already",
                fix="leave r out to train it, or name another with "
                + as_option("lora", adapter="second"),
            )
        if any(param.is_meta for param in model.parameters()):
            raise PluginError(
                "lora: the model has no weights yet, and its adapters couldn't be drawn",
                fix="leave out " + as_option("fsdp", meta=True),
            )

    def _adapted(self, model: nn.Module) -> nn.Module:
        peft = optional_module("peft", "lora")
        targets: Any = self.target_modules
        config = peft.LoraConfig(
            r=self.r,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            modules_to_save=copy.copy(self.modules_to_save),  # peft adds names to it
            task_type=self.task_type,
        )
        layers = [name for name, _ in model.named_modules()]
        try:
            adapted = with_adapter(model, self.adapter, config)
        except ValueError as error:
            raise PluginError(
                f"lora: peft can't adapt {type(model).__name__}: {one_line(str(error), 200)}",
                fix="name its layers, " + as_option("lora", target_modules=["q_proj", "v_proj"]),
            ) from error
        if targets != ["all-linear"] and not isinstance(targets, str):
            _require_layers("target_modules", targets or (), layers)
        _require_layers("modules_to_save", self.modules_to_save or (), layers)
        return adapted


def _require_layers(option: str, names: Sequence[str], layers: Sequence[str]) -> None:
    """Checks that each name is the end of a layer's name: peft silently ignores the others."""
    for name in names:
        end = f".{name}" if option == "target_modules" else name  # as peft compares them
        if not any(f".{layer}".endswith(end) for layer in layers):
            ends = sorted({layer.rpartition(".")[2] for layer in layers if layer})
            raise PluginError(
                f"lora: {option}: no layer is named {name!r}{closest(name, ends)}",
                fix="give names of the model's layers, or the ends of their names",
            )


def _save(model: nn.Module, path: Path) -> None:
    """Writes weights atomically: a kill leaves either the old file or the new file."""
    from safetensors.torch import save_model

    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".new-{path.name}")
    try:
        save_model(model, str(new))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
