"""References: frozen models that a trained model is compared with, with methods `build` and `log_probs`."""

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
    """Computes the log-probabilities to compare the trained model's with."""

    def build(self, state: State) -> None:
        """Prepares the reference; called at `init`."""

    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the log-probability of each document's labels, shape (B, K), without gradients."""


class Companion:
    """A second model, frozen.

    Args:
        make: builds the model.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._model: nn.Module | None = None

    def build(self, state: State) -> None:
        """Builds the model on the run's device."""
        self._model = state.companion("reference", self._make)

    @torch.no_grad()
    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the log-probabilities with the second model."""
        assert self._model is not None
        return sums_of(self._model, self._model, batch)


class AdaptersOff:
    """The trained model with its peft adapters disabled."""

    def build(self, state: State) -> None:
        """Does nothing: plugins may add adapters later."""

    @torch.no_grad()
    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the log-probabilities in evaluation mode: a reference has no dropout."""
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
    """The trained model itself, before its training."""

    def build(self, state: State) -> None:
        """Does nothing: the model exists already."""

    @torch.no_grad()
    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the log-probabilities in evaluation mode."""
        with in_eval_mode(state.model):
            return sums_of(state.model, state.model, batch)


class Chosen:
    """The reference that suits the model, chosen at `init`.

    Args:
        kind: "companion", "adapters-off", or "auto": adapters-off if the model has adapters.
        make_reference: builds the reference model; None to use the trained model's initial weights.
        make_model: builds the trained model a second time; None if the reference is only used before
            training, when the model itself can serve.
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
        """Chooses the reference and builds it."""
        is_adapted = "lora" in state.plugins or bool(adapters_of(state.model))
        if self._make_reference is not None:
            self._reference = Companion(self._make_reference)
        elif self._kind == "adapters-off" or (self._kind == "auto" and is_adapted):
            self._reference = AdaptersOff()
        elif self._make_model is not None:
            self._reference = Companion(self._make_model)
        self._reference.build(state)

    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the log-probabilities with the chosen reference."""
        return self._reference.log_probs(state, batch)


def sums_of(model: nn.Module, bare: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the log-probability of each document's labels, shape (B, K).

    Args:
        model: the model to call, possibly a wrapper such as DDP.
        bare: the model without a wrapper.
    """
    log_probs, _ = log_probs_of(model, bare, batch)
    return log_probs.sum(-1)


def log_probs_of(
    model: nn.Module, bare: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each document's next tokens, 0 for tokens that aren't labels.

    Returns:
        Log-probabilities, shape (B, K, T - 1), and logits, shape (B, K, T, V).
    """
    shape = batch["input_ids"].shape[:2]
    flat = {name: batch[name].flatten(0, 1) for name in DOCUMENTS}
    outputs: Any = model(**model_inputs(bare, flat))
    log_probs, _ = token_log_probs(outputs.logits, flat["labels"])
    logits = outputs.logits
    return log_probs.view(*shape, -1), logits.view(*shape, *logits.shape[1:])
