"""What a checkpoint says of itself, beside its tensors: what it is of, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop.naming import plain

if TYPE_CHECKING:
    from eventloop.state import State


def facts_of(state: State) -> dict[str, Any]:
    """Returns what tells a checkpoint from others: moment, ranks, metrics, plugins, settings.

    Returns:
        Values that JSON can hold. The metrics are those known at that moment.
    """
    return {
        "moment": state.clock.moment()._asdict(),
        "world_size": state.world_size,
        "duration": None if state.duration is None else str(state.duration),
        "stop_reason": state.stop_reason,
        "metrics": {
            f"{dataset}/{name}": float(value)
            for dataset, results in state.eval_metrics.items()
            for name, value in results.items()
            if value.numel() == 1
        },
        "manifest": dict(state.manifest),
    }


def described(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Returns the kind of each optimizer, and the numbers that it was made with."""
    return {
        name: {
            "kind": f"{type(one).__module__}.{type(one).__qualname__}",
            "groups": [
                {key: plain(_value(group.get(key, value))) for key, value in one.defaults.items()}
                for group in one.param_groups
            ],
        }
        for name, one in optimizers.items()
    }


def _value(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
