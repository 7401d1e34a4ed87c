"""Checks that all ranks train the same model: settings before the run, weights during the run."""

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
# Settings that may differ between ranks: only rank 0 writes files.
_SETTINGS_OF_A_RANK = ("device", "run_dir")
_MAX_SHOWN = 5
_FREE = "list options that may differ between ranks in `free_options` of the plugin's class"
DECIDED_ALONE = (
    "if a rank decides by a value that other ranks don't have, such as its own loss, let the ranks "
    "agree first: state.all_gather(...)"
)
# Tolerance for the sum of a parameter, as a fraction of its norm. Smaller differences may be rounding
# between machines of different kinds; real drift grows until it exceeds the tolerance.
_ROUNDING = 1e-4


def require_same_run(processes: Processes, manifest: Mapping[str, Any]) -> None:
    """Raises EventloopError if settings, plugins, their order or versions differ between ranks."""
    for section in ("settings", "task", "plugins", "off", "owners", "order", "versions"):
        content = manifest[section]
        if isinstance(content, Mapping):
            content = {
                key: value for key, value in content.items() if key not in _SETTINGS_OF_A_RANK
            }
        if section == "plugins":
            content = [_without_free_options(plugin) for plugin in content]
        require_same(processes, section, content)


def _without_free_options(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plugin's entry in a manifest without the options that may differ between ranks.

    These are the plugin's `free_options`, and options that are functions.
    """
    left_out = {*plugin["free"], *plugin["functions"]}
    options = {name: value for name, value in plugin["options"].items() if name not in left_out}
    return {**plugin, "options": options, "functions": []}


def require_same(
    processes: Processes, subject: str, value: Any, when: str = "", *, by_part: bool = False
) -> None:
    """Compares a JSON value over all ranks, leaf by leaf. Collective: every rank must call it.

    Ranks exchange a digest, and the value only if the digests differ.

    Args:
        subject: a plural noun for the value, for the message.
        when: since when the values may differ, for the message.
        by_part: whether only ranks that hold the same part of the model must have the same value.

    Raises:
        EventloopError: the values differ; the message shows the first differences.
    """
    if processes.are_same(value):
        return
    layout = processes.layout
    leaves_by_part = dict[object, dict[str, dict[str, Any]]]()
    for rank, value_of_rank in enumerate(processes.all_gather(value)):
        leaves_by_rank = leaves_by_part.setdefault(by_part and layout.part(rank), {})
        leaves_by_rank[layout.label(rank)] = dict(_flat("", value_of_rank))
    for leaves_by_rank in leaves_by_part.values():
        _compare(subject, leaves_by_rank, when)


def optimizers_of(state: State) -> dict[str, Any]:
    """Returns the class, settings, parameter names and shapes of each optimizer, equal on all ranks."""
    names = {id(param): name for name, param in state.model.named_parameters()}
    properties: dict[str, Any] = {}
    for name, optimizer in state.optimizers.items():
        properties[f"{name}.kind"] = full_name(type(optimizer))
        properties |= settings_of(name, optimizer.param_groups)
        for idx, group in enumerate(optimizer.param_groups):
            properties[f"{name}.groups.{idx}.params"] = ", ".join(
                f"{names.get(id(param), 'unnamed')} {list(param.shape)}"
                for param in group["params"]
            )
    return properties


def settings_of(name: str, groups: Any) -> dict[str, Any]:
    """Returns the settings of an optimizer's parameter groups by their paths."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return dict(_leaves(f"{name}.groups", settings))


def schedules_of(state: State) -> dict[str, Any]:
    """Returns the class and state of each scheduler, which must be equal on all ranks."""
    properties: dict[str, Any] = {}
    for interval, pairs in state.schedulers.items():
        for idx, (name, scheduler) in enumerate(pairs):
            path = f"{name}.{interval}.{idx}"
            properties[f"{path}.kind"] = full_name(type(scheduler))
            properties |= dict(_leaves(path, scheduler.state_dict()))
    return properties


def lengths_of(name: str, dataloader: Any) -> dict[str, Any]:
    """Returns the lengths of a data loader that eventloop shards; {} for other data loaders.

    A data loader that shards itself may have different lengths on the ranks.
    """
    loader = loader_of(dataloader)
    innermost = list(loader.innermost())
    if innermost[0] is loader:
        return _lengths_of_innermost(name, loader)
    lengths: dict[str, Any] = {}
    for idx, inner_loader in enumerate(innermost):
        lengths |= _lengths_of_innermost(f"{name}.{idx}", inner_loader)
    return lengths


def _lengths_of_innermost(name: str, loader: Loader) -> dict[str, Any]:
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


def _compare(subject: str, leaves_by_rank: dict[str, dict[str, Any]], when: str) -> None:
    """Raises EventloopError if the leaves of a rank differ from those of the first rank."""
    first_rank, first_leaves = next(iter(leaves_by_rank.items()))
    for rank, leaves in leaves_by_rank.items():
        keys = [key for key in first_leaves | leaves if first_leaves.get(key) != leaves.get(key)]
        if not keys:
            continue
        differences = [
            f"{key}: {first_leaves.get(key, _NOTHING)} on rank {first_rank}, "
            f"{leaves.get(key, _NOTHING)} on rank {rank}"
            for key in keys
        ]
        raise EventloopError(
            f"ranks {first_rank} and {rank} would train differently: their {subject} differ{when}",
            differs=first_of(differences, _MAX_SHOWN, "; "),
            fix="start every rank with the same command, environment, files and versions; "
            + (_FREE if subject == "plugins" else DECIDED_ALONE),
        )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their paths: `mixup.options.alpha`."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), child)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        for idx, child in enumerate(value):
            yield from _flat(f"{name}.{child.get('name', idx)}".lstrip("."), child)
    else:
        yield name, value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nested value with their paths: numbers and strings, or a type's name.

    The repr of an object can contain its address, which differs between processes.
    """
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(f"{name}.{key}", child)
    elif isinstance(value, (list, tuple)):
        for idx, child in enumerate(value):
            yield from _leaves(f"{name}.{idx}", child)
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

    Weights are compared between the ranks that hold copies of them: all ranks, or of sharded weights
    the ranks with the same shard, identified by its coordinates in the mesh.

    Args:
        sums: the sum of each trained parameter, by name.
        when: since when the weights may differ, for the message.

    Raises:
        EventloopError: they differ; the message names the first parameter and both ranks.
    """
    params = dict(state.model.named_parameters())
    layout = processes.layout
    # Parameters that torch's DistributedDataParallel leaves to the user; private, but there is no
    # public way to ask for them (torch 2.13).
    ignored_names = getattr(state.model, "_ddp_params_and_buffers_to_ignore", ())
    shared = {}
    for name, total in sums.items():
        # If a plugin wraps the model instead of DDP, only it knows which plain weights ranks share.
        is_managed = processes.is_strategy or sharded(params[name]) is not None
        if is_managed and name not in ignored_names:
            shared[name] = (layout.part(processes.rank) + indices_of(params[name]), total)
    coords = {coord for coord, _ in shared.values()}
    if all(len(coord) == len(layout.sizes) for coord in coords):
        return  # no weight has a copy on another rank
    settings: dict[str, object] = {}
    for name, optimizer in state.optimizers.items():
        settings |= settings_of(name, optimizer.param_groups)
    is_replicated = coords == {()}
    if is_replicated and processes.are_same((settings, shared)):
        return
    seen_at = f", as seen at batch {state.clock.batch}"
    require_same(processes, "optimizers", settings, seen_at, by_part=True)
    # Digests first: the sums and norms of all ranks, below, are only gathered if something differs.
    if not is_replicated:
        rows = [(coord, name, total) for name, (coord, total) in shared.items()]
        texts = {coord: repr([row for row in rows if row[0] == coord]) for coord in coords}
        digests = [(coord, crc32(text.encode())) for coord, text in texts.items()]
        gathered = processes.all_gather(digests)
        pairs = {pair for digests_of_rank in gathered for pair in digests_of_rank}
        if len(pairs) == len({coord for coord, _ in pairs}):
            return
    norms = {name: local(param).norm().item() for name, param in params.items()}
    sums_of_rank = {(name, *coord): (total, norms[name]) for name, (coord, total) in shared.items()}
    copies_by_shard: dict[Any, list[tuple[int, float, float]]] = {}
    for rank, gathered_sums in enumerate(processes.all_gather(sums_of_rank)):
        for shard, (total, norm) in gathered_sums.items():
            copies_by_shard.setdefault(shard, []).append((rank, total, norm))
    for (name, *_), copies in copies_by_shard.items():
        reference_rank, reference, _ = copies[0]
        rank, total, _ = max(copies, key=lambda copy: abs(copy[1] - reference))
        if abs(total - reference) > _ROUNDING * max(norm for *_, norm in copies):
            reference_label = layout.label(reference_rank)
            label = layout.label(rank)
            raise EventloopError(
                f"ranks {reference_label} and {label} have drifted apart: {name!r} differs {when}",
                differs=f"its sum is {reference:.6g} on rank {reference_label}, {total:.6g} on rank "
                f"{label}",
                fix="look for code that acts on a single rank: that sets a learning rate, hooks "
                "gradients, skips a step or writes weights",
            )
