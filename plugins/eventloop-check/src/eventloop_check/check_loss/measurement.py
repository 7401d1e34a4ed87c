"""What one run measures of the loss, as JSON can hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eventloop_check.check_loss.compare import Comparison


@dataclass(frozen=True)
class Part:
    """A microbatch, or what a rank has of it.

    Args:
        loss: as the task computes it.
        weight: in the mean over the batch, as the run weighs it.
        sizes: by what it could be weighed: samples, labels that count, positions.
    """

    loss: float
    weight: float
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Update:
    """One update of the optimizers.

    Args:
        idx: its number within the batch.
        loss: of the batch: the weighted mean of its parts.
        parts: of all ranks, in order.
        compared: with the reference; None in a reference.
        same_outputs: whether the model's outputs are those of the reference; None if unknown.
    """

    idx: int
    loss: float
    parts: Sequence[Part]
    compared: Comparison | None = None
    same_outputs: bool | None = None


@dataclass(frozen=True)
class Measurement:
    """What a run measures.

    Args:
        updates: of the batch; none where the task trains without the loop's updates.
        samples: of the batch; 0 where there is no data loader.
        unpicked: why its samples can't be ordered otherwise; "".
        unpadded: why its padding can't be changed; "".
        unpacked: why there are no packed documents to order otherwise; "".
        dropouts: where dropout was switched off.
        draws: what else draws random numbers.
        batch_norms: layers that compute over the samples they are given.
        moved_buffers: of the model, by the passes over the batch.
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
        """Returns it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        """Returns what `to_json` was called on."""
        updates = [
            Update(
                one["idx"],
                one["loss"],
                [Part(**part) for part in one["parts"]],
                None if one["compared"] is None else Comparison(**one["compared"]),
                one["same_outputs"],
            )
            for one in content["updates"]
        ]
        return cls(**{**content, "updates": updates})
