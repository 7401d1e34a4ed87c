"""The plugin added to each run: prepares its batch, and measures loss and gradients."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eventloop import hookimpl
from eventloop.toolbox import Microbatches, map_tensors, num_samples
from eventloop_check.check_loss.compare import are_same_outputs, compare
from eventloop_check.check_loss.documents import NotPackedError, Pack
from eventloop_check.check_loss.draws import Draws, switch_off_recurrent_dropout
from eventloop_check.check_loss.laws import VARIANTS
from eventloop_check.check_loss.measurement import Measurement, Part, Update
from eventloop_check.check_loss.microbatches import joined, prints_of, sizes_of
from eventloop_check.check_loss.samples import (
    CannotPickError,
    OnlyBatch,
    has_samples,
    part_of_rank,
    picked,
)
from eventloop_check.check_loss.sequences import NotPaddedError, Sequences

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from eventloop import State

BATCH = "batch.pt"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class CheckLoss:
    """Measures the loss and the gradients of a single batch, and skips the optimizer step.

    `eventloop check-loss` adds it to its runs. The loop itself weights microbatches and ranks, and sums
    their gradients.

    Args:
        variant: name of the variant to measure.
        folder: folder of the check, with the batch and the measurements of the references.
        samples: maximum number of samples in the batch.
    """

    role = "algorithm"

    def __init__(self, *, variant: str, folder: Path, samples: int = 16) -> None:
        self.variant = variant
        self.folder = Path(folder)
        self.samples = samples
        self._kind = VARIANTS[variant]
        self._draws = Draws(is_other=self._kind.other_draws)
        self._recurrent: list[str] = []
        self._batch: Any = {}
        self._parts: list[Part] = []
        self._prints: list[Tensor] | None = []
        self._updates: list[Update] = []
        self._measured: list[dict[str, Any]] = []
        self._reference: list[dict[str, Any]] = []
        self._moved: list[str] = []

    @hookimpl(conditional=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Any:
        """Assigns each of several ranks its share of the batch: a dataset may be too small for both."""
        if self._kind.num_ranks == 1:
            return None
        self._batch = self._saved("cpu")
        return OnlyBatch(self._prepared(state.data_rank)) if has_samples(self._batch) else None

    @hookimpl
    def build_eval_dataloaders(self, state: State) -> Mapping[str, Any]:
        """Evaluates nothing."""
        return {}

    @hookimpl
    def build_schedulers(self, state: State) -> Mapping[str, Any]:
        """Has no schedulers: no step is made."""
        return {}

    @hookimpl
    def build_metrics(self, state: State, dataset: str) -> Mapping[str, Any]:
        """Computes no metrics."""
        return {}

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Reads the reference, and switches off dropout that no function call would reveal."""
        # The core's own comparison of microbatches; the report of this command is more detailed.
        warnings.filterwarnings("ignore", "microbatches of .* train something else")
        self._recurrent = switch_off_recurrent_dropout(state.model)
        if self._kind.reference:
            self._reference = torch.load(self.folder / f"{self._kind.reference}.pt")

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Replaces the batch of the data loader with the check's batch."""
        if self.variant == "whole":
            self._batch = state.batch = self._limited(state.batch)
            file = self.folder / BATCH
            torch.save(map_tensors(lambda tensor: tensor.to("cpu"), state.batch), file)
        else:  # even if the data loader made it: another plugin may have transformed it since
            self._batch = self._saved(state.device)
            state.batch = self._prepared(state.data_rank)
        state.even_batches = False  # ranks get unequal parts, whose weights are to be compared

    @hookimpl(wrapper=True, tryfirst=True)
    def train_batch(self, state: State) -> Generator[None, Any, Any]:
        """Switches dropout off, and records random draws and changes of the model's buffers."""
        buffers_before = {name: buffer.clone() for name, buffer in state.model.named_buffers()}
        with self._draws:
            result = yield
        buffers = dict(state.model.named_buffers())
        self._moved = [
            name
            for name, buffer in buffers_before.items()
            if name in buffers and not torch.equal(buffer, buffers[name])
        ]
        return result

    @hookimpl(trylast=True)
    def before_backward(self, state: State) -> None:
        """Measures a microbatch. Synchronizes with the device: the run is short."""
        assert state.loss is not None
        # The loop doesn't ask for the weight of a batch in a single piece.
        is_whole = state.num_microbatches == 1 and state.data_world_size == 1
        weight = 1.0 if is_whole else float(state.current_weight())
        self._parts.append(Part(float(state.loss.detach()), weight, sizes_of(state.microbatch)))
        prints = prints_of(state.outputs, state.microbatch)
        if prints is None or self._prints is None:
            self._prints = None
        else:
            self._prints += prints

    @hookimpl(wrapper=True, tryfirst=True)
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> Generator[None, Any, Any]:
        """Measures the loss and the gradients of the batch, before they are clipped."""
        assert state.loss is not None
        ranks = state.all_gather((float(state.loss), self._parts, self._prints))
        loss = sum(rank_loss for rank_loss, _, _ in ranks) / len(ranks)
        parts = [part for _, rank_parts, _ in ranks for part in rank_parts]
        prints = joined([rank_prints for _, _, rank_prints in ranks])
        if self._kind.batch == "reversed":
            prints.reverse()
        elif self._kind.batch == "documents" and prints:
            prints = Pack.of(self._batch).restored(prints)
        named = dict(state.model.named_parameters())
        gradients = {
            name: param.grad.detach().to("cpu", copy=True)
            for name, param in named.items()
            if param.grad is not None
        }
        self._record(loss, parts, prints, gradients)
        self._parts = []
        self._prints = []
        return (yield)

    @hookimpl
    def should_skip_step(self, state: State) -> bool:
        """Skips the step: the run only measures."""
        return True

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Writes the measurement, on rank 0."""
        if state.rank:
            return
        batch = self._batch
        measured = Measurement(
            self._updates,
            num_samples(batch) if has_samples(batch) else 0,
            _obstacle(lambda: picked(batch, [0])) if has_samples(batch) else "it has no samples",
            _obstacle(lambda: Sequences.of(batch)),
            _obstacle(lambda: Pack.of(batch)),
            [*self._draws.dropouts, *self._recurrent],
            [*self._draws.found],
            [
                name
                for name, module in state.model.named_modules()
                if isinstance(module, _BATCH_NORMS) and module.training
            ],
            self._moved,
        )
        if not self._kind.reference:
            torch.save(self._measured, self.folder / f"{self.variant}.pt")
        file = self.folder / f"{self.variant}.json"
        file.write_text(json.dumps(measured.to_json()), encoding="ascii")

    def _record(
        self,
        loss: float,
        parts: Sequence[Part],
        prints: list[Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Stores an update of a reference, or compares an update with the reference's."""
        idx = len(self._updates)
        if not self._kind.reference:
            self._measured.append({"loss": loss, "gradients": gradients, "prints": prints})
            self._updates.append(Update(idx, loss, parts))
            return
        if idx == len(self._reference):
            return  # more updates than the reference has; reported by their number
        expected = self._reference[idx]
        total_weight = sum(part.weight for part in parts)
        # The mean loss over no elements is NaN and has weight 0: leave it out of the sum.
        weighted_losses = sum(abs(part.loss) * part.weight for part in parts if part.weight)
        size = weighted_losses / (total_weight or 1.0)
        compared = compare(loss, gradients, expected["loss"], expected["gradients"], size)
        same_outputs = are_same_outputs(prints, expected["prints"])
        self._updates.append(Update(idx, loss, parts, compared, same_outputs))

    def _limited(self, batch: Any) -> Any:
        """Returns the first samples of a batch; the whole batch if samples can't be selected.

        `Microbatches` can't be split any further: returns the first samples of its first part.
        """
        if isinstance(batch, Microbatches):
            batch = batch.parts[0]
        if not has_samples(batch) or num_samples(batch) <= self.samples:
            return batch
        try:
            return picked(batch, range(self.samples))
        except CannotPickError:
            return batch

    def _saved(self, device: torch.device | str) -> Any:
        """Loads the batch that the first run saved; trusted, because this command wrote it."""
        return torch.load(self.folder / BATCH, map_location=device, weights_only=False)

    def _prepared(self, rank: int) -> Any:
        """Returns the batch as changed for this variant and rank."""
        batch = self._batch
        kind = self._kind
        if kind.num_ranks > 1 and has_samples(batch):
            return picked(batch, part_of_rank(num_samples(batch), rank))
        if kind.batch == "reversed":
            return picked(batch, range(num_samples(batch))[::-1])
        if kind.batch == "documents":
            return Pack.of(batch).reversed()
        if kind.batch == "short":
            return Sequences.of(batch).short()
        if kind.batch == "padded":
            return Sequences.of(batch).padded()
        if kind.batch == "other padding":
            return Sequences.of(batch).with_other_padding()
        return batch


def _obstacle(call: Callable[[], object]) -> str:
    try:
        call()
    except (CannotPickError, NotPackedError, NotPaddedError) as error:
        return str(error)
    return ""
