"""FSDP2 for eventloop: shards parameters, gradients and optimizer states over the ranks."""

from typing import TYPE_CHECKING, Any

from eventloop_fsdp.plugin import Fsdp

if TYPE_CHECKING:
    from eventloop_fsdp.sharding import parts_of, shard

__all__ = ["Fsdp", "parts_of", "shard"]


def __getattr__(name: str) -> Any:
    """Imports the modules that need FSDP2 on first use: importing FSDP2 takes a second or more."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eventloop_fsdp import sharding

    return getattr(sharding, name)
