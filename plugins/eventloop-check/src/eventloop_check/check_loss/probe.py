"""The plugin that takes part in a run: prepares its batch, and measures loss and gradients."""

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
    """Measures the loss and the gradients of one batch, and makes no step with them.

    `eventloop check-loss` adds it to its runs. The weights of microbatches and ranks, and the sum of
    their gradients, are those of the loop.

    Args:
        variant: how the batch is computed.
        folder: of the check: has the batch, and what was measured of the references.
        samples: of the batch, at most.
    """

    role = "algorithm"

    def __init__(self, *, variant: str, folder: Path, samples: int = 16) -> None:
        self.variant = variant
        self.folder = Path(folder)
        self.samples = samples
        self._kind = VARIANTS[variant]
        self._draws = Draws(is_other=self._kind.other_draws)
        self._recurrent: list[str] = []
        self._whole: Any = {}
        self._parts: list[Part] = []
        self._prints: list[Tensor] | None = []
        self._updates: list[Update] = []
        self._measured: list[dict[str, Any]] = []
        self._expected: list[dict[str, Any]] = []
        self._moved: list[str] = []

    @hookimpl(conditional=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Any:
        """Has each of several ranks take its part of the batch: a data set may be too small for both."""
        if self._kind.num_ranks == 1:
            return None
        self._whole = self._saved("cpu")
        return OnlyBatch(self._prepared(state.data_rank)) if has_samples(self._whole) else None

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
        """Reads the reference, and switches off what isn't seen when it is called."""
        # The core's comparison of halves; the report of this run says more.
        warnings.filterwarnings("ignore", "microbatches of .* train something else")
        self._recurrent = switch_off_recurrent_dropout(state.model)
        if self._kind.reference:
            self._expected = torch.load(self.folder / f"{self._kind.reference}.pt")

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Replaces the batch of the data loader with that of the check."""
        if self.variant == "whole":
            self._whole = state.batch = self._limited(state.batch)
            file = self.folder / BATCH
            torch.save(map_tensors(lambda one: one.to("cpu"), state.batch), file)
        else:  # on several ranks again: another plugin may have transformed it by now
            self._whole = self._saved(state.device)
            state.batch = self._prepared(state.data_rank)
        state.even_batches = False  # so that the ranks compare what their parts weigh

    @hookimpl(wrapper=True, tryfirst=True)
    def train_batch(self, state: State) -> Generator[None, Any, Any]:
        """Switches dropout off, and sees what draws random numbers and what moves in the model."""
        before = {name: one.clone() for name, one in state.model.named_buffers()}
        with self._draws:
            result = yield
        now = dict(state.model.named_buffers())
        self._moved = [
            name for name, one in before.items() if name in now and not torch.equal(one, now[name])
        ]
        return result

    @hookimpl(trylast=True)
    def before_backward(self, state: State) -> None:
        """Measures a microbatch. It waits for the device: this run is short."""
        assert state.loss is not None
        # Of a batch in one piece, a run asks for no weight.
        is_whole = state.num_microbatches == 1 and state.data_world_size == 1
        weight = 1.0 if is_whole else float(state.current_weight())
        self._parts.append(Part(float(state.loss.detach()), weight, sizes_of(state.microbatch)))
        found = prints_of(state.outputs, state.microbatch)
        if found is None or self._prints is None:
            self._prints = None
        else:
            self._prints += found

    @hookimpl(wrapper=True, tryfirst=True)
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> Generator[None, Any, Any]:
        """Measures the loss and the gradients of the batch, before they are clipped."""
        assert state.loss is not None
        ranks = state.all_gather((float(state.loss), self._parts, self._prints))
        loss = sum(one for one, _, _ in ranks) / len(ranks)
        parts = [part for _, several, _ in ranks for part in several]
        prints = joined([several for _, _, several in ranks])
        if self._kind.batch == "reversed":
            prints.reverse()
        elif self._kind.batch == "documents" and prints:
            prints = Pack.of(self._whole).restored(prints)
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
        """Makes no step."""
        return True

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Writes what was measured."""
        if state.rank:
            return
        batch = self._whole
        measured = Measurement(
            self._updates,
            num_samples(batch) if has_samples(batch) else 0,
            _why_not(lambda: picked(batch, [0])) if has_samples(batch) else "it has no samples",
            _why_not(lambda: Sequences.of(batch)),
            _why_not(lambda: Pack.of(batch)),
            [*self._draws.dropouts, *self._recurrent],
            [*self._draws.found],
            [
                name
                for name, one in state.model.named_modules()
                if isinstance(one, _BATCH_NORMS) and one.training
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
        """Keeps an update of a reference, or compares it with that of the reference."""
        idx = len(self._updates)
        if not self._kind.reference:
            self._measured.append({"loss": loss, "gradients": gradients, "prints": prints})
            self._updates.append(Update(idx, loss, parts))
            return
        if idx == len(self._expected):
            return  # an update more than the batch in one piece has
        expected = self._expected[idx]
        total = sum(one.weight for one in parts)
        # The mean over nothing is NaN, and weighs nothing.
        size = sum(abs(one.loss) * one.weight for one in parts if one.weight) / (total or 1.0)
        compared = compare(loss, gradients, expected["loss"], expected["gradients"], size)
        same = are_same_outputs(prints, expected["prints"])
        self._updates.append(Update(idx, loss, parts, compared, same))

    def _limited(self, batch: Any) -> Any:
        """Returns the first samples of a batch; all of one whose samples can't be picked.

        Of `Microbatches`, which nothing splits, they are those of the first part.
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
        """Returns the batch that the first run saved: this command's file, of whatever classes."""
        return torch.load(self.folder / BATCH, map_location=device, weights_only=False)

    def _prepared(self, rank: int) -> Any:
        """Returns what this variant, or this rank of it, makes of the batch."""
        batch = self._whole
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


def _why_not(call: Callable[[], object]) -> str:
    try:
        call()
    except (CannotPickError, NotPackedError, NotPaddedError) as error:
        return str(error)
    return ""
