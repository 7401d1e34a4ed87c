"""What ranks tell each other while a batch is computed: its counts, requests to stop or to save."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from eventloop.distributed.processes import Exchange
from eventloop.distributed.rank_store import bulletin
from eventloop.distributed.thread_location import wait_for
from eventloop.errors import TaskError

if TYPE_CHECKING:
    from eventloop.distributed.data_parallel import DataParallel
    from eventloop.distributed.processes import Agreed
    from eventloop.signals import StopReason
    from eventloop.state import State

# Even batches between exchanges, and the seconds within which a signal is noticed, if no batch takes longer.
_EVERY = 16
_NOTICED_S = 0.25


class ExchangeOfRanks(Exchange):
    """Exchanges counts and requests between ranks: an asynchronous sum on the host.

    If batches can be uneven, each has one. Otherwise every `_EVERY`th batch has one, or more of
    them if batches are slow, so that a signal isn't delayed; rank 0's timings decide for all
    ranks.
    """

    def __init__(self, processes: DataParallel) -> None:
        self._processes = processes
        self._board = bulletin()
        self.start_fit()

    def start_fit(self) -> None:
        self._stop_reason: StopReason | None = None
        self._is_urgent = self._checkpoint = False
        self._work: Any = None
        self._interval = 1.0
        # Since the last exchange: batches, seconds on rank 0, and what the losses weighed.
        self._since = time.perf_counter()
        self._num_batches, self._seconds, self._weight, self._sent = 0, 0.0, 0.0, 0.0

    def request_stop(self, state: State, reason: StopReason) -> None:
        self._stop_reason = self._stop_reason or reason
        self._is_urgent = self._is_urgent or reason.kind in ("signal", "loss")

    def request_checkpoint(self, state: State) -> None:
        self._checkpoint = True

    def weigh(self, weight: float) -> None:
        """Adds the weights of batches that should be the same on all ranks."""
        self._weight += weight

    def start(self, state: State) -> None:
        since, self._since = self._since, time.perf_counter()
        self._seconds += (self._since - since) * (self._processes.rank == 0)
        self._num_batches += 1
        if self._board is not None:
            self._board.num_batches += 1
        # A plugin's request is granted at a batch that doesn't depend on the time.
        is_due = not state.even_batches or not (state.clock.batch + 1) % _EVERY
        if not is_due and self._num_batches < self._interval:
            return
        stops = self._is_urgent or (is_due and self._stop_reason is not None)
        self._sent = self._weight
        counts = (state.count.samples, state.count.tokens, self._seconds, self._sent)
        # Read through the array, no operation of torch is needed to see the sums.
        self._sums = array("d", (*counts, float(stops), float(self._checkpoint)))
        sums = torch.frombuffer(self._sums, dtype=torch.float64)
        self._work = dist.all_reduce(sums, group=self._processes.host, async_op=True)

    def end(self, state: State) -> Agreed:
        processes = self._processes
        if self._work is None:
            return state.count.samples * processes.data_world_size, 0, 0.0
        wait_for(self._work)
        samples, tokens, seconds, weight, stops, checkpoints = self._sums
        if weight != self._sent * processes.world_size:
            raise _uneven(self._num_batches, self._sent, weight)
        if stops or checkpoints:
            self.settle(state)
        self._interval = _NOTICED_S * self._num_batches / seconds if seconds else 1.0
        self._weight -= self._sent
        self._work, self._num_batches, self._seconds = None, 0, 0.0
        num = processes.world_size // processes.data_world_size  # each of whom has counted the same
        return int(samples) // num, int(tokens) // num, seconds

    def settle(self, state: State) -> None:
        own = (self._stop_reason, self._checkpoint, self._weight)
        reasons, checkpoints, weights = zip(*self._processes.all_gather(own), strict=True)
        if any(one != self._weight for one in weights):
            raise _uneven(self._num_batches, self._weight, sum(weights))
        state.stop_reason = state.stop_reason or next(filter(None, reasons), None)
        if any(checkpoints):
            state.checkpoint_requested, self._checkpoint = True, False


def _uneven(num_batches: int, own: float, total: float) -> TaskError:
    return TaskError(
        f"the last {num_batches} batches of this rank counted for {own:g} samples, and those of all "
        f"ranks for {total:g}: a plugin changes how many samples a batch has, on some ranks only",
        fix="have it change them alike on all ranks, or implement the action count_batch in it, so that "
        "the ranks compare what each batch counts for",
    )
