"""The plugin of the task `dpo`: when references and divergences are computed, and the loss of a batch."""

# B = row of a batch, K = document of a row, T = token

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from eventloop import State, hookimpl
from eventloop.toolbox import Microbatches, split
from eventloop_llm.chats.pairs import DOCUMENTS
from eventloop_llm.models.passes import token_log_probs
from eventloop_llm.models.references import Reference, log_probs_of, sums_of
from eventloop_llm.models.stored_reference import Stored
from eventloop_llm.packing import IGNORED
from eventloop_llm.preferences.preference_losses import (
    Loss,
    LossOptions,
    check_weights,
    kto_losses,
    pair_losses,
)

NllOn = Literal["answer", "all"]


class Preferences:
    """Trains a language model on preferences: replaces the forward pass and returns the loss.

    Args:
        loss: dpo, ipo, kto, orpo, simpo or cpo.
        options: the loss's numbers.
        reference: reference model; None for losses without a reference.
        nll_on: whether the chosen answer's language modeling loss covers the answer, or its prompt too.
        desired_weight: weight of desired answers in the KTO loss.
        undesired_weight: weight of undesired answers in the KTO loss.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    name = "dpo"

    def __init__(
        self,
        loss: Loss,
        options: LossOptions,
        reference: Reference | None,
        *,
        nll_on: NllOn = "answer",
        desired_weight: float = 1.0,
        undesired_weight: float = 1.0,
    ) -> None:
        self._weights = {"desired_weight": desired_weight, "undesired_weight": undesired_weight}
        check_weights(**self._weights)
        self.loss_name = loss
        self._options = options
        self._reference = reference
        self._nll_on = nll_on
        self._rows_per_label: Tensor | None = None
        self._rows_per_kind: Tensor | None = None
        self._divergence: Tensor | None = None

    @hookimpl
    def init(self, state: State) -> None:
        """Builds the reference, before the model may get adapters."""
        if self._reference is not None:
            self._reference.build(state)

    @hookimpl(wrapper=True)
    def fit_start(self, state: State) -> Generator[None, None, None]:
        """Computes or loads the reference's log-probabilities, once the run's folder is locked."""
        yield
        if isinstance(self._reference, Stored):
            self._reference.prepare(state)

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """Computes the counts and the divergence that need the whole batch, over all microbatches and ranks."""
        batch = state.batch
        microbatches = [*batch] if isinstance(batch, Microbatches) else [batch]
        if self._options.nll_weight:
            counts = torch.zeros(2, device=state.device, dtype=torch.float64)
            for microbatch in microbatches:
                labels = self._nll_labels(microbatch)[:, 1:]
                counts += torch.stack([labels.new_full((), len(labels)), (labels != IGNORED).sum()])
            _add_over_ranks(counts)
            self._rows_per_label = (counts[0] / counts[1].clamp(min=1)).float()
        if self.loss_name == "kto":
            if not isinstance(batch, Microbatches) and state.microbatch_size is not None:
                microbatches = split(batch, state.microbatch_size)
            is_desired = torch.cat([microbatch["is_desired"] for microbatch in microbatches])
            counts = torch.stack([is_desired.sum(), (~is_desired).sum()])
            _add_over_ranks(counts)
            self._rows_per_kind = counts.sum() / counts.clamp(min=1)
            diverge = state.precision.under_autocast(self._divergence_of)
            self._divergence = diverge(state, microbatches)

    @hookimpl
    def forward(self, state: State) -> dict[str, Any]:
        """Returns the mean loss over the rows of a microbatch, and logs rewards."""
        batch = state.batch if state.microbatch is None else state.microbatch
        loss = self._kto(state, batch) if self.loss_name == "kto" else self._pairs(state, batch)
        return {"loss": loss}

    def _pairs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        options = self._options
        log_probs_BKT, logits_BKTV = log_probs_of(state.active_model, state.model, batch)
        answers_BK = log_probs_BKT.sum(-1)
        if self._reference is not None:
            answers_BK = answers_BK - self._reference.log_probs(state, batch)
        _log_rewards(state, options.beta * answers_BK.detach())
        if options.is_mean:
            answers_BK = answers_BK / _num_labels(batch).clamp(min=1)
        chosen_B, rejected_B = answers_BK.unbind(1)
        loss = pair_losses(self.loss_name, chosen_B, rejected_B, options).mean()
        if options.nll_weight:
            labels = self._nll_labels(batch)
            log_probs, is_counted = token_log_probs(logits_BKTV[:, 0], labels)
            nll = -log_probs.sum()
            if state.eval_name is None and self._rows_per_label is not None:
                # Makes the sum over microbatches the mean over all labels of the batch.
                nll = nll / len(labels) * self._rows_per_label
            else:
                nll = nll / is_counted.sum().clamp(min=1)
            state.log("nll", nll.detach(), "mean")
            loss = loss + options.nll_weight * nll
        return loss

    def _kto(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        assert self._reference is not None
        divergence = self._divergence
        if state.microbatch is None or divergence is None:
            divergence = self._divergence_of(state, [batch], is_local=True)
        ratios = sums_of(state.active_model, state.model, _documents(batch, 0))[:, 0]
        ratios = ratios - self._reference_of(state, batch)[:, 0]
        is_desired = batch["is_desired"]
        state.log("rewards/divergence", divergence, "mean")
        rewards = self._options.beta * ratios.detach()
        kinds = (("desired", is_desired), ("undesired", ~is_desired))
        for idx, (name, is_of_kind) in enumerate(kinds):
            total = (rewards * is_of_kind).sum()
            if state.microbatch is None or self._rows_per_kind is None:
                mean = total / is_of_kind.sum().clamp(min=1)
            else:  # makes the mean over microbatches the mean over all answers of this kind
                mean = total / len(is_of_kind) * self._rows_per_kind[idx]
            state.log(f"rewards/{name}", mean, "mean")
        beta = self._options.beta
        return kto_losses(ratios, is_desired, divergence, beta=beta, **self._weights).mean()

    @torch.no_grad()
    def _divergence_of(
        self, state: State, microbatches: list[Mapping[str, Tensor]], *, is_local: bool = False
    ) -> Tensor:
        """Returns the mean log-ratio of mismatched answers to the reference, at least 0, shape ().

        Args:
            is_local: whether to leave out the other ranks.
        """
        sums = torch.zeros(2, device=state.device, dtype=torch.float64)
        num_passes = len(microbatches)
        if not is_local and state.world_size > 1:  # a sharded model needs all ranks for each pass
            num_passes = max(state.all_gather(num_passes))
        for idx in range(num_passes):
            batch = microbatches[min(idx, len(microbatches) - 1)]
            model = sums_of(state.model, state.model, _documents(batch, 1))[:, 0]
            ratios = model - self._reference_of(state, batch)[:, 1]
            if idx < len(microbatches):
                sums += torch.stack([ratios.sum(), ratios.new_full((), len(ratios))])
        if not is_local:
            _add_over_ranks(sums)
        return (sums[0] / sums[1]).clamp(min=0).float()

    def _reference_of(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        assert self._reference is not None
        return self._reference.log_probs(state, batch)

    def _nll_labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the labels for the language modeling loss of chosen answers, shape (B, T)."""
        if self._nll_on == "answer":
            return batch["labels"][:, 0]
        is_padding = batch["document_ids"][:, 0] < 0
        return batch["input_ids"][:, 0].masked_fill(is_padding, IGNORED)


def _documents(batch: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Returns a single document of each row, K = 1."""
    return {name: batch[name][:, number : number + 1] for name in DOCUMENTS}


def _num_labels(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"][..., 1:] != IGNORED).sum(-1)


def _log_rewards(state: State, rewards_BK: Tensor) -> None:
    chosen_B, rejected_B = rewards_BK.unbind(1)
    state.log("rewards/chosen", chosen_B.mean(), "mean")
    state.log("rewards/rejected", rejected_B.mean(), "mean")
    state.log("rewards/margin", (chosen_B - rejected_B).mean(), "mean")
    state.log("rewards/accuracy", (chosen_B > rejected_B).float().mean(), "mean")


def _add_over_ranks(sums: Tensor) -> None:
    """Adds up the numbers of all ranks on the device, so that no rank waits on its host."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
