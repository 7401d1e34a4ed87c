"""The plugin: which layers are checkpointed, and the header's note on them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from eventloop import PluginError, State, StateView, hookimpl
from eventloop_checkpointing.layers import (
    checkpointed,
    has_running_statistics,
    matching_layers,
    repeated_layers,
)


class Checkpointing:
    """Saves memory: layers keep their inputs alone, and run again in the backward pass.

    The weights after a run have the bits that they have without it. What it costs is one more forward
    pass of the layers, a third of a step at most.

    Args:
        layers: which ones, as a pattern of names: "encoder.layer.*". "auto": those that the model
            repeats, such as the blocks of a transformer.
        every: of these, every so many: 1 means all, 2 every second.
        keep: "nothing" but the inputs; or "matmuls": the results of matrix products and of attention,
            so that only what is cheap is computed twice.

    Raises:
        ValueError: `every` is less than 1, or `keep` is something else.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """

    def __init__(
        self,
        *,
        layers: str = "auto",
        every: int = 1,
        keep: Literal["nothing", "matmuls"] = "nothing",
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} is not a whole number of 1 or more")
        if keep not in ("nothing", "matmuls"):
            raise ValueError(f"keep={keep!r} is neither 'nothing' nor 'matmuls'")
        self.layers = layers
        self.every = every
        self.keep = keep
        self._note = ""
        self._num_layers = 0

    @hookimpl
    def unsuitable(self, state: StateView) -> str | None:
        """Returns why the plugin can't be used: the model repeats no layers; None if it can."""
        if self._num_layers:
            return None
        return "the model repeats no layers; name some with the option `layers`"

    @hookimpl
    def init(self, state: State) -> None:
        """Changes the layers, before they are compiled, wrapped or sharded."""
        model = state.model
        if self.layers == "auto":
            names = repeated_layers(model)
        else:
            names = matching_layers(model, self.layers)
            if not names:
                some = ", ".join(name for name, _ in list(model.named_modules())[1:6])
                raise PluginError(
                    f"no module's name matches layers={self.layers!r}",
                    fix=f"the model has {some} ...; `*` and `?` stand for parts of a name",
                )
        names = names[:: self.every]
        for name in names:
            if state.settings.compile and has_running_statistics(model.get_submodule(name)):
                raise PluginError(
                    f"{name} has batch norms, whose statistics compiled code would move twice",
                    fix="train without compile, or choose other layers with the option `layers`",
                )
            checkpointed(model.get_submodule(name), keep=self.keep)
        self._num_layers = len(names)
        without = _without_cache(model) if names else ""
        self._note = f"{_listed(names)} run twice, and keep {self.keep}{without}" if names else ""

    @hookimpl
    def header_note(self) -> str:
        """Returns which layers run twice."""
        return self._note


def _without_cache(model: nn.Module) -> str:
    """Switches off a cache of keys and values, to which a layer that runs again would add again."""
    config = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        return ""
    config.use_cache = False  # type: ignore[union-attr]
    return "; the model's use_cache is off"


def _listed(names: list[str]) -> str:
    more = len(names) - 2
    return f"{', '.join(names[:2])}{f' and {more} more layers' if more > 0 else ''}"
