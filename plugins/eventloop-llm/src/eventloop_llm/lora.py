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
    """Trains low-rank adapters of a model, of peft; checkpoints hold them and not the base model.

    Without `r` the task's model has adapters already: `peft.get_peft_model`, of any kind and number,
    has made it.

    Args:
        r: the rank of the adapter that is made.
        target_modules: names of the layers that are adapted, or the ends of their names; peft knows
            those of many models of transformers. ["all-linear"] are all linear ones but the head.
        lora_alpha: what the adapter adds is multiplied by this, divided by the rank.
        lora_dropout: the share of an adapter's inputs that is dropped.
        use_rslora: whether it is divided by the root of the rank, Kalajdzievski 2023.
        use_dora: whether the size of weights is trained apart from their direction, Liu et al. 2024.
        modules_to_save: names of layers that are trained and saved whole: a new head, say.
        task_type: what peft calls the task, "CAUSAL_LM" say; written into the exported folder.
        adapter: the name of the adapter.
        merge: whether an export has what adapters add in the base model's weights, under its names: a
            file, or a folder as `save_pretrained` writes it.

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
            raise ValueError("options of an adapter have no effect without r; r=8, say")
        if r is not None and not (isinstance(r, int) and r >= 1):
            raise ValueError(f"r={r!r} is not a rank; give 1 or more, r=8, say")
        if not 0 <= lora_dropout < 1:
            raise ValueError(f"{lora_dropout=} is not a share; give 0 or more, less than 1")
        if not adapter or "." in adapter or "/" in adapter:
            raise ValueError(f"{adapter=} is not the name of an adapter; give one without . and /")

    @hookimpl(trylast=True)
    def init(self, state: State) -> None:
        """Makes the adapter, without advancing the global random generators."""
        if self.r is not None:
            self._require_new(state.model)
            generator = state.generator("lora", alike=True)
            seed = torch.randint(2**31, (1,), generator=generator, device=state.device)
            with kept_generators():
                torch.manual_seed(int(seed))
                state.model = self._adapted(state.model)
        elif not adapters_of(state.model):
            raise PluginError(
                f"lora: {type(state.model).__name__} has no adapters",
                fix="have some made, "
                + as_option("lora", r=8)
                + ", or by peft.get_peft_model in the "
                "function that makes the model",
            )
        params = [*state.model.parameters()]
        num_trained = sum(param.numel() for param in params if param.requires_grad)
        num_all = sum(param.numel() for param in params)
        names = ", ".join(adapters_of(state.model))
        self._note = f"{num_trained:,} of {num_all:,} parameters are trained; adapters: {names}"

    @hookimpl
    def header_note(self) -> str:
        """Returns how much is trained, and which adapters."""
        return self._note

    @hookimpl
    def select_weights(self, state: State, names: Sequence[str]) -> list[str]:
        """Returns the names of adapters, of what else is trained, and of buffers."""
        return names_to_save(state.model, names)

    @hookimpl(conditional=True)
    def read_weights(self, state: State, path: Path, plugins: Sequence[str]) -> FoundWeights | None:
        """Reads a folder of peft's; the base model stays as it is."""
        folders = folders_of(state.model, path)
        if not folders:
            return None
        weights = dict(state.model.state_dict())
        for adapter, folder in folders.items():
            weights |= read_adapter(state.model, adapter, folder)
        return FoundWeights(weights, {})

    @hookimpl(conditional=True, tryfirst=True)
    def export(self, state: State, path: Path) -> Path | None:
        """Writes the adapters where the path has no suffix, merged weights where that is asked for."""
        is_sharded = any(sharded(param) is not None for param in state.model.parameters())
        if not path.suffix and not self.merge:
            weights = state.model.state_dict()
            slices = {
                name: slice_of(weights[name])
                for adapter in adapters_of(state.model)
                for name in saved_names(state.model, adapter)
            }
            whole = gathered(slices, state.all_gather, keep=state.rank == 0)
            if state.rank == 0:
                save_folder(state.model, whole, path)
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
    """Checks that each name is the end of a layer's; peft leaves out those that aren't."""
    for name in names:
        end = f".{name}" if option == "target_modules" else name  # as peft compares them
        if not any(f".{layer}".endswith(end) for layer in layers):
            ends = sorted({layer.rpartition(".")[2] for layer in layers if layer})
            raise PluginError(
                f"lora: {option}: no layer is named {name!r}{closest(name, ends)}",
                fix="give names of the model's layers, or the ends of their names",
            )


def _save(model: nn.Module, path: Path) -> None:
    """Writes weights as a whole: a kill leaves the file before or the new one."""
    from safetensors.torch import save_model

    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".new-{path.name}")
    try:
        save_model(model, str(new))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
