"""References: the models that a model is compared with, each with the methods `build` and `log_probs`."""

# B = row of a batch, K = document of a row, T = token

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from eventloop import PluginError, State
from eventloop.toolbox import as_option, in_eval_mode
from eventloop_llm.chats.pairs import DOCUMENTS
from eventloop_llm.models.adapters import adapters_of
from eventloop_llm.models.passes import model_inputs, token_log_probs

ReferenceKind = Literal["auto", "companion", "adapters-off"]


class Reference(Protocol):
    """Returns log-probabilities that the model's are compared with."""

    def build(self, state: State) -> None:
        """Called at `init`."""

    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum over the labels of each document, shape (B, K), without a gradient."""


class Companion:
    """A second model, frozen.

    Args:
        make: returns it.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._model: nn.Module | None = None

    def build(self, state: State) -> None:
        """Makes the model, where the run's is."""
        self._model = state.companion("reference", self._make)

    @torch.no_grad()
    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes them."""
        assert self._model is not None
        return sums_of(self._model, self._model, batch)


class AdaptersOff:
    """The model that is trained, without its adapters of peft."""

    def build(self, state: State) -> None:
        """Does nothing: adapters may be made later."""

    @torch.no_grad()
    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes them in evaluation mode: a reference drops nothing."""
        model: Any = state.model
        if not adapters_of(model):
            raise PluginError(
                f"{type(model).__name__} has no adapters that could be switched off",
                fix="make some, "
                + as_option("lora", r=8)
                + ", or leave out reference='adapters-off'",
            )
        with model.disable_adapter(), in_eval_mode(model):
            return sums_of(model, model, batch)


class Itself:
    """The model that will be trained, as it is."""

    def build(self, state: State) -> None:
        """Does nothing: the model exists already."""

    @torch.no_grad()
    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes them in evaluation mode."""
        with in_eval_mode(state.model):
            return sums_of(state.model, state.model, batch)


class Chosen:
    """The reference that suits the model, chosen at `init`.

    Args:
        kind: which; "auto": the model without its adapters if it has some.
        make_reference: returns another model; None without one.
        make_model: returns the model once more; None where it is enough to ask it before it is trained.
    """

    def __init__(
        self,
        kind: ReferenceKind,
        make_reference: Callable[[], nn.Module] | None,
        make_model: Callable[[], nn.Module] | None,
    ) -> None:
        self._kind = kind
        self._make_reference = make_reference
        self._make_model = make_model
        self._reference: Reference = Itself()

    def build(self, state: State) -> None:
        """Chooses, and builds."""
        is_adapted = "lora" in state.plugins or bool(adapters_of(state.model))
        if self._make_reference is not None:
            self._reference = Companion(self._make_reference)
        elif self._kind == "adapters-off" or (self._kind == "auto" and is_adapted):
            self._reference = AdaptersOff()
        elif self._make_model is not None:
            self._reference = Companion(self._make_model)
        self._reference.build(state)

    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes them."""
        return self._reference.log_probs(state, batch)


def sums_of(model: nn.Module, bare: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the log-probability of each document's labels, shape (B, K).

    Args:
        model: is called; DDP's wrapper, say.
        bare: the model without a wrapper.
    """
    log_probs, _ = log_probs_of(model, bare, batch)
    return log_probs.sum(-1)


def log_probs_of(
    model: nn.Module, bare: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each next token of each document, 0 of those that aren't labels.

    Returns:
        Shape (B, K, T - 1): of labels; and logits, shape (B, K, T, V).
    """
    shape = batch["input_ids"].shape[:2]
    flat = {name: batch[name].flatten(0, 1) for name in DOCUMENTS}
    outputs: Any = model(**model_inputs(bare, flat))
    log_probs, _ = token_log_probs(outputs.logits, flat["labels"])
    logits = outputs.logits
    return log_probs.view(*shape, -1), logits.view(*shape, *logits.shape[1:])
