"""The measurement of a run, JSON-serializable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eventloop_check.check_loss.compare import Comparison


@dataclass(frozen=True)
class Part:
    """A microbatch, or a rank's share of it.

    Args:
        loss: the loss that the task computes.
        weight: its weight in the mean over the batch, in this run.
        sizes: sizes by which it could be weighted: samples, labels, positions.
    """

    loss: float
    weight: float
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Update:
    """An update of the optimizers.

    Args:
        idx: position within the batch.
        loss: loss of the batch: the weighted mean over its parts.
        parts: parts on all ranks, in order.
        compared: comparison with the reference; None in a reference.
        same_outputs: whether the model's outputs equal the reference's; None if unknown.
    """

    idx: int
    loss: float
    parts: Sequence[Part]
    compared: Comparison | None = None
    same_outputs: bool | None = None


@dataclass(frozen=True)
class Measurement:
    """The measurement of a run.

    Args:
        updates: updates of the batch; empty if the task trains without the loop's updates.
        samples: number of samples in the batch; 0 without a data loader.
        unpicked: why its samples can't be reordered; "" if they can.
        unpadded: why its padding can't be changed; "" if it can.
        unpacked: why it has no packed documents to reorder; "" if it has.
        dropouts: lines at which dropout was switched off.
        draws: other random draws.
        batch_norms: layers that compute statistics over the samples.
        moved_buffers: buffers of the model that the passes over the batch changed.
    """

    updates: Sequence[Update]
    samples: int
    unpicked: str
    unpadded: str
    unpacked: str
    dropouts: Sequence[str]
    draws: Sequence[str]
    batch_norms: Sequence[str]
    moved_buffers: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Returns the measurement as JSON-serializable data."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        """Inverse of `to_json`."""
        updates = [
            Update(
                update["idx"],
                update["loss"],
                [Part(**part) for part in update["parts"]],
                None if update["compared"] is None else Comparison(**update["compared"]),
                update["same_outputs"],
            )
            for update in content["updates"]
        ]
        return cls(**{**content, "updates": updates})
