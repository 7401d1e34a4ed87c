"""A reference whose log-probabilities are computed once and stored in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eventloop import EventloopError, PluginError, State
from eventloop.toolbox import RunFolder
from eventloop_chats.pairs import PairBatch, Pairs
from eventloop_language_models.references import Reference

FILE = "reference.safetensors"


class Stored:
    """Log-probabilities of another reference, computed once; they are in the run's folder.

    Args:
        source: computes them.
        datasets: all rows, whose numbers go on from set to set.
        pad_id, batch_size: of the batches that they are computed in.
    """

    def __init__(
        self,
        source: Reference,
        datasets: Sequence[Pairs],
        *,
        pad_id: int,
        batch_size: int,
    ) -> None:
        self._source, self._datasets = source, datasets
        self._collate, self._batch_size = PairBatch(pad_id), batch_size
        self._table: Tensor | None = None

    def build(self, state: State) -> None:
        """Builds what computes them."""
        self._source.build(state)

    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Looks them up by the numbers of rows, on the device."""
        if self._table is None:
            raise EventloopError(
                "the reference's log-probabilities aren't computed before a fit",
                fix="evaluate in a run that is trained, or with another --task.reference",
            )
        return self._table[batch["number"]]

    def prepare(self, state: State) -> None:
        """Computes all of them, or reads what the run has computed; every rank must call it.

        Raises:
            PluginError: the run goes on, and its file is missing or of other data.
        """
        if self._table is not None:
            return
        digest = "".join(one.digest for one in self._datasets)
        folder = RunFolder(state.run_dir)
        if state.clock.batch:
            table = self._read(folder, digest)
        else:
            table = self._computed(state)
            if state.rank == 0:
                folder.write(FILE, _packed(table, digest))
        self._table = table.to(state.device)

    def _read(self, folder: RunFolder, digest: str) -> Tensor:
        from safetensors.torch import load

        problem = f"is missing in {folder.path}"
        if FILE in folder.names():
            found = load(folder.read(FILE, 2**16 + 8 * sum(map(len, self._datasets))))
            if bytes(found["digest"].tolist()).decode() == digest:
                return found["log_probs"]
            problem = "is of other data"
        raise PluginError(
            f"{FILE}, the reference's log-probabilities, {problem}",
            fix="put it back, or begin a new run in another run_dir",
        )

    def _computed(self, state: State) -> Tensor:
        """Each rank computes every n-th batch, and all of them as many."""
        rows = [one[idx] for one in self._datasets for idx in range(len(one))]
        size = self._batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        num_each = -(-len(batches) // state.data_world_size)
        compute = state.precision.under_autocast(self._source.log_probs)
        found = []
        for at in range(num_each):
            mine = batches[(at * state.data_world_size + state.data_rank) % len(batches)]
            batch = {name: one.to(state.device) for name, one in self._collate(mine).items()}
            found.append((batch["number"].tolist(), compute(state, batch).float().tolist()))
        table = torch.zeros(len(rows), 2)
        for of_rank in state.all_gather(found):
            for numbers, values in of_rank:
                table[numbers] = torch.tensor(values)
        return table


def _packed(table: Tensor, digest: str) -> bytes:
    from safetensors.torch import save

    return save(
        {"log_probs": table, "digest": torch.tensor(list(digest.encode()), dtype=torch.uint8)}
    )
