"""A reference whose log-probabilities are computed once and stored in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eventloop import EventloopError, PluginError, State
from eventloop.toolbox import RunFolder
from eventloop_llm.chats.pairs import PairBatch, Pairs
from eventloop_llm.models.references import Reference

FILE = "reference.safetensors"


class Stored:
    """Log-probabilities of another reference, computed once and stored in the run's folder.

    Args:
        source: computes the log-probabilities.
        datasets: all rows; row numbers continue from dataset to dataset.
        pad_id, batch_size: for the batches in which they are computed.
    """

    def __init__(
        self,
        source: Reference,
        datasets: Sequence[Pairs],
        *,
        pad_id: int,
        batch_size: int,
    ) -> None:
        self._source = source
        self._datasets = datasets
        self._collate = PairBatch(pad_id)
        self._batch_size = batch_size
        self._table: Tensor | None = None

    def build(self, state: State) -> None:
        """Builds the reference that computes the log-probabilities."""
        self._source.build(state)

    def log_probs(self, state: State, batch: Mapping[str, Tensor]) -> Tensor:
        """Looks the log-probabilities up by row number, on the device."""
        if self._table is None:
            raise EventloopError(
                "the reference's log-probabilities aren't computed before a fit",
                fix="evaluate in a run that is trained, or with another --task.reference",
            )
        return self._table[batch["number"]]

    def prepare(self, state: State) -> None:
        """Computes the log-probabilities of all rows, or reads them from the run's folder; collective.

        Raises:
            PluginError: the run is resumed, and its file is missing or belongs to other data.
        """
        if self._table is not None:
            return
        digest = "".join(dataset.digest for dataset in self._datasets)
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
            saved = load(folder.read(FILE, 2**16 + 8 * sum(map(len, self._datasets))))
            if bytes(saved["digest"].tolist()).decode() == digest:
                return saved["log_probs"]
            problem = "belongs to other data"
        raise PluginError(
            f"{FILE}, the reference's log-probabilities, {problem}",
            fix="put it back, or begin a new run in another run_dir",
        )

    def _computed(self, state: State) -> Tensor:
        """Computes the table; every rank computes every n-th batch and returns the table of all rows."""
        rows = [dataset[idx] for dataset in self._datasets for idx in range(len(dataset))]
        size = self._batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        num_each = -(-len(batches) // state.data_world_size)
        compute = state.precision.under_autocast(self._source.log_probs)
        local_values = []
        for step in range(num_each):
            # Wraps around at the end: a sharded reference needs the same number of passes on all ranks.
            number = (step * state.data_world_size + state.data_rank) % len(batches)
            collated = self._collate(batches[number])
            batch = {name: tensor.to(state.device) for name, tensor in collated.items()}
            local_values.append((batch["number"].tolist(), compute(state, batch).float().tolist()))
        table = torch.zeros(len(rows), 2)
        for rank_values in state.all_gather(local_values):
            for numbers, values in rank_values:
                table[numbers] = torch.tensor(values)
        return table


def _packed(table: Tensor, digest: str) -> bytes:
    from safetensors.torch import save

    return save(
        {"log_probs": table, "digest": torch.tensor(list(digest.encode()), dtype=torch.uint8)}
    )
