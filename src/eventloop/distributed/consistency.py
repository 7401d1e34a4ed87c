"""Checks that the ranks train the same: settings before the run, and weights during it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch import Tensor

from eventloop.data.loaders import Loader, MapStyleLoader, loader_of
from eventloop.errors import EventloopError, first_of
from eventloop.naming import full_name
from eventloop.training.sharded_tensors import indices_of, local, sharded

if TYPE_CHECKING:
    from eventloop.distributed.data_parallel import DataParallel
    from eventloop.distributed.processes import Processes
    from eventloop.state import State

_NOTHING = "nothing"
# Each rank may have its own; files are rank 0's.
_OWN = ("device", "run_dir")
_MOST_SHOWN = 5
_FREE = "an option that may differ by rank stands in `free_options` of the plugin's class"
DECIDED_ALONE = (
    "what a rank decides alone, by its own loss say, has to be agreed upon: state.all_gather(...)"
)
# Of a parameter's norm. Less may come from rounding on machines of different kinds, and what isn't
# rounding grows until it is more.
_ROUNDING = 1e-4


def require_same_run(processes: Processes, manifest: Mapping[str, Any]) -> None:
    """Raises EventloopError if settings, plugins, their order or versions differ."""
    for what in ("settings", "task", "plugins", "off", "owners", "order", "versions"):
        mine = manifest[what]
        if isinstance(mine, Mapping):
            mine = {key: one for key, one in mine.items() if key not in _OWN}
        if what == "plugins":
            mine = [_without_free_options(one) for one in mine]
        require_same(processes, what, mine)


def _without_free_options(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plugin's entry in a manifest without the options that may differ between ranks.

    These are the plugin's `free_options`, and options that are functions.
    """
    left_out = {*plugin["free"], *plugin["functions"]}
    options = {name: one for name, one in plugin["options"].items() if name not in left_out}
    return {**plugin, "options": options, "functions": []}


def require_same(
    processes: Processes, what: str, mine: Any, when: str = "", *, by_part: bool = False
) -> None:
    """Compares a JSON value over all ranks, leaf by leaf. Collective: every rank must call it.

    Ranks exchange a digest, and the value only if the digests differ.

    Args:
        when: since when it may differ, for the message.
        by_part: whether it is of the modules that a rank holds; those of other parts may differ.

    Raises:
        EventloopError: it differs; the message shows the first differences.
    """
    if not processes.are_same(mine):
        layout = processes.layout
        parts = dict[object, dict[str, dict[str, Any]]]()
        for rank, one in enumerate(processes.all_gather(mine)):
            part = parts.setdefault(by_part and layout.part(rank), {})
            part[layout.label(rank)] = dict(_flat("", one))
        for of_ranks in parts.values():
            _compare(what, of_ranks, when)


def optimizers_of(state: State) -> dict[str, Any]:
    """Returns what ranks must share of optimizers: class, settings, parameter names and shapes."""
    names = {id(one): name for name, one in state.model.named_parameters()}
    found: dict[str, Any] = {}
    for name, optimizer in state.optimizers.items():
        found[f"{name}.kind"] = full_name(type(optimizer))
        found |= settings_of(name, optimizer.param_groups)
        for idx, group in enumerate(optimizer.param_groups):
            found[f"{name}.groups.{idx}.params"] = ", ".join(
                f"{names.get(id(one), 'of no name')} {list(one.shape)}" for one in group["params"]
            )
    return found


def settings_of(name: str, groups: Any) -> dict[str, Any]:
    """Returns the settings of an optimizer's parameter groups by their paths."""
    settings = [{key: one for key, one in group.items() if key != "params"} for group in groups]
    return dict(_leaves(f"{name}.groups", settings))


def schedules_of(state: State) -> dict[str, Any]:
    """Returns what ranks must share of the schedulers: class and state."""
    found: dict[str, Any] = {}
    for interval, pairs in state.schedulers.items():
        for idx, (name, scheduler) in enumerate(pairs):
            path = f"{name}.{interval}.{idx}"
            found[f"{path}.kind"] = full_name(type(scheduler))
            found |= dict(_leaves(path, scheduler.state_dict()))
    return found


def lengths_of(name: str, dataloader: Any) -> dict[str, Any]:
    """Returns the lengths of a data loader that eventloop shards; other lengths may differ."""
    loader = loader_of(dataloader)
    parts = list(loader.innermost())
    if parts[0] is loader:
        return _lengths_of_part(name, loader)
    lengths: dict[str, Any] = {}
    for idx, part in enumerate(parts):
        lengths |= _lengths_of_part(f"{name}.{idx}", part)
    return lengths


def _lengths_of_part(name: str, loader: Loader) -> dict[str, Any]:
    dataloader = loader.dataloader
    if not loader.is_sharded_here:
        return {}
    if not isinstance(loader, MapStyleLoader):
        return {f"{name}.batches": len(dataloader)}
    return {
        f"{name}.samples": length_hint(dataloader.dataset, -1),
        f"{name}.drawn": length_hint(loader.order_sampler, -1),
        f"{name}.batch_size": dataloader.batch_size,
        f"{name}.drop_last": dataloader.drop_last,
    }


def _compare(what: str, of_ranks: dict[str, dict[str, Any]], when: str) -> None:
    one, first = next(iter(of_ranks.items()))
    for rank, theirs in of_ranks.items():
        keys = [key for key in first | theirs if first.get(key) != theirs.get(key)]
        if not keys:
            continue
        shown = [
            f"{key}: {first.get(key, _NOTHING)} on rank {one}, {theirs.get(key, _NOTHING)} on "
            f"rank {rank}"
            for key in keys
        ]
        raise EventloopError(
            f"ranks {one} and {rank} would train different things: their {what} differ{when}",
            differs=first_of(shown, _MOST_SHOWN, "; "),
            fix="start every rank with the same command, environment, files and versions; "
            + (_FREE if what == "plugins" else DECIDED_ALONE),
        )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nest with their paths: `mixup.options.alpha`."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), one)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        for idx, one in enumerate(value):
            yield from _flat(f"{name}.{one.get('name', idx)}".lstrip("."), one)
    else:
        yield name, value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers and strings of a nest with their paths; the type of anything else.

    The repr of an object can contain its address, which differs between processes.
    """
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for idx, one in enumerate(value):
            yield from _leaves(f"{name}.{idx}", one)
    elif isinstance(value, Tensor):
        yield name, value.item() if value.numel() == 1 else f"a tensor of {list(value.shape)}"
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, value
    else:
        yield name, type(value).__qualname__


def require_same_weights(
    processes: DataParallel, state: State, sums: Mapping[str, float], when: str
) -> None:
    """Compares weights, by their sums, and optimizer settings. Collective: every rank must call it.

    Raises:
        EventloopError: they differ; the message has the first parameter and both ranks.
    """
    params = dict(state.model.named_parameters())
    layout = processes.layout
    # Parameters that torch's DistributedDataParallel was told to leave alone; private, but there is
    # no public way to ask (torch 2.13).
    alone = getattr(state.model, "_ddp_params_and_buffers_to_ignore", ())
    shared = {
        name: (layout.part(processes.rank) + indices_of(params[name]), total)
        for name, total in sums.items()
        if name not in alone and (processes.is_strategy or sharded(params[name]) is not None)
    }
    coords = {coord for coord, _ in shared.values()}
    if all(len(coord) == len(layout.sizes) for coord in coords):
        return  # each weight is on one rank
    settings: dict[str, object] = {}
    for name, optimizer in state.optimizers.items():
        settings |= settings_of(name, optimizer.param_groups)
    is_copied = coords == {()}
    if is_copied and processes.are_same((settings, shared)):
        return
    seen = f", as seen at batch {state.clock.batch}"
    require_same(processes, "optimizers", settings, seen, by_part=True)
    if not is_copied:
        named = [(coord, name, total) for name, (coord, total) in shared.items()]
        texts = {coord: repr([one for one in named if one[0] == coord]) for coord in coords}
        digests = [(coord, crc32(text.encode())) for coord, text in texts.items()]
        pairs = {pair for theirs in processes.all_gather(digests) for pair in theirs}
        if len(pairs) == len({coord for coord, _ in pairs}):
            return
    norms = {name: local(one).norm().item() for name, one in params.items()}
    mine = {(name, *one): (total, norms[name]) for name, (one, total) in shared.items()}
    found: dict[Any, list[tuple[int, float, float]]] = {}
    for rank, theirs in enumerate(processes.all_gather(mine)):
        for key, (total, norm) in theirs.items():
            found.setdefault(key, []).append((rank, total, norm))
    for (name, *_), copies in found.items():
        (first, value, _), *_ = copies
        rank, other, _ = max(copies, key=lambda one: abs(one[1] - value))
        if abs(other - value) > _ROUNDING * max(norm for *_, norm in copies):
            one = layout.label(first)
            another = layout.label(rank)
            raise EventloopError(
                f"ranks {one} and {another} have drifted apart: {name!r} differs {when}",
                differs=f"its sum is {value:.6g} on rank {one}, {other:.6g} on rank {another}",
                fix="look for what one rank does alone: a learning rate, a hook on gradients, a step "
                "that it skips, weights that it writes",
            )
