"""Whether the ranks are about to train the same thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eventloop.errors import EventloopError
from eventloop.ranks.processes import Processes

_NOTHING = "nothing"
# Each rank may have its own; files are rank 0's.
_OWN = ("device", "run_dir")


def require_same_run(processes: Processes, manifest: Mapping[str, Any]) -> None:
    """Compares the settings, the plugins, their order and the versions of all ranks.

    Raises:
        EventloopError: something differs.
    """
    everybody = processes.gathered(manifest)
    for what in ("settings", "task", "plugins", "off", "owners", "order", "versions"):
        flat = [dict(_flat("", manifest[what])) for manifest in everybody]
        _compare(what, [{key: one[key] for key in one if key not in _OWN} for one in flat])


def require_same(processes: Processes, what: str, mine: Mapping[Any, Any]) -> None:
    """Compares something of all ranks, by key; every rank waits for the others.

    Raises:
        EventloopError: it differs; the message shows where, in the first places.
    """
    _compare(what, processes.gathered(dict(mine)))


def _compare(what: str, everybody: list[dict[Any, Any]]) -> None:
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        keys = [key for key in first | theirs if first.get(key) != theirs.get(key)]
        if not keys:
            continue
        shown = [f"{key}: {first.get(key, _NOTHING)} / {theirs.get(key, _NOTHING)}" for key in keys]
        more = f", and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise EventloopError(
            f"ranks 0 and {rank} would train different things: their {what} differ",
            differs="; ".join(shown[:5]) + more,
            fix="start every rank with the same command, environment, files and versions",
        )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Gives the leaves of a nest with their paths: `mixup.options.alpha`."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), one)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        for idx, one in enumerate(value):
            yield from _flat(f"{name}.{one.get('name', idx)}".lstrip("."), one)
    else:
        yield name, value
