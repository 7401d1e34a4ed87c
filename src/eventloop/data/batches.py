"""Batches: their samples, inputs and targets, descriptions for messages, and copies to the device."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventloop.data.microbatches import Microbatches
from eventloop.devices import kind_of
from eventloop.errors import TaskError

Move = Callable[[Any], Any]
LABELS = "labels"
_PAIRS = (tuple, list)
_MOST_PARTS = 6
_MOST_CHARS = 300


class Count(NamedTuple):
    """The number of samples and tokens of a batch; 0 tokens if the task doesn't count them."""

    samples: int
    tokens: int


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """Applies `function` to every tensor of a nest, and to every object with a method `to`.

    Tuples, lists, named tuples, `Microbatches` and mappings are rebuilt (mappings as dicts); any
    other value is returned unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, (tuple, list)):
        return rebuild(batch, [map_tensors(function, value) for value in batch])
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, Microbatches):
        return Microbatches(map_tensors(function, microbatch) for microbatch in batch)
    if callable(getattr(batch, "to", None)):
        return function(batch)
    return batch


def to_host(outputs: Any) -> Any:
    """Copies a nest of tensors to the host, without their graph."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu"), outputs)


def mover_to(device: torch.device) -> Move:
    """Returns a function that copies a batch from the host to a device asynchronously."""
    if (kind := kind_of(device)).is_host:
        return lambda batch: batch
    if kind.streams is not None:
        return SideStream(device, kind.streams)
    return lambda batch: map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


class SideStream:
    """Copies batches on a side stream, from pinned memory.

    The loop never waits for the device: it asks for a batch while the device still computes the
    previous batch, and a copy on another stream overlaps with the computation. No batch has to be
    fetched ahead, so random draws keep the order of a plain loop.

    Tensors on the device are returned unchanged. An object with its own method `to` is copied on the
    current stream, because the memory that it holds isn't known.

    Args:
        device: the device to copy to.
        streams: a module with `Stream`, `stream` and `current_stream`; see `DeviceKind.streams`.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        self._device = device
        self._streams = streams
        self._side = streams.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """Returns the batch on the device, usable by all work queued after this call."""
        copies: list[Tensor] = []

        def move(source: Any) -> Any:
            if not isinstance(source, Tensor):
                return source.to(self._device, non_blocking=True)
            if source.device == self._device:
                return source
            if source.is_cpu and not source.is_pinned():
                # torch can't pin an expanded tensor, whose entries share memory.
                is_plain = source.layout is torch.strided and not source.is_nested
                source = (
                    source.contiguous() if is_plain and 0 in source.stride() else source
                ).pin_memory()
            with self._streams.stream(self._side):
                copies.append(source.to(self._device, non_blocking=True))
            return copies[-1]

        moved = map_tensors(move, batch)
        if copies:
            computing = self._streams.current_stream(self._device)
            computing.wait_stream(self._side)
            for copy in copies:
                # The memory belongs to the side stream. Without this, the allocator could reuse it
                # for the next copy before the computation has read it.
                copy.record_stream(computing)
        return moved


def num_samples(batch: Any) -> int:
    """Returns the number of samples: the leading dimension that all tensors of a nest share.

    Targets of a pair may be flattened: inputs of shape (N, T, ...) go with N * T targets. A pair of
    lists with an entry for each sample, as detectors take them, has as many samples as entries. An
    empty mapping, the batch of a run without a data set, counts as 1 sample. A nested tensor has as
    many samples as components.

    Raises:
        TaskError: the nest has no tensor with a dimension, or a tensor without samples. Or its tensors
            have different leading dimensions, as in a graph, or in a single sample, which isn't a
            batch. Or it is a list of mappings that could be samples or batches.
    """
    # Called for every batch, which is almost always a pair of tensors, so that case comes first and
    # makes few calls.
    if isinstance(batch, _PAIRS) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            try:
                shape = inputs.shape
                target_shape = targets.shape
            except RuntimeError:  # a nested tensor of strided layout has no shape (torch 2.13)
                return _leading_that_fits(batch)
            if shape and target_shape:
                samples = shape[0]
                if samples and samples == target_shape[0]:
                    return samples
    if isinstance(batch, Microbatches):
        return sum(map(num_samples, batch))
    return len(batch[0]) if is_listed(batch) else _leading_that_fits(batch)


def inputs_of(batch: Any) -> Any:
    """Returns the inputs of a batch: the first entry of a pair or of `(inputs,)`, else the batch."""
    return batch[0] if isinstance(batch, _PAIRS) and len(batch) in (1, 2) else batch


def targets_of(batch: Any) -> Any:
    """Returns the targets of a batch: the second entry of a pair, a mapping's "labels", else None."""
    if is_pair(batch):
        return batch[1]
    return batch.get(LABELS) if isinstance(batch, Mapping) else None


def with_inputs(batch: Any, inputs: Any) -> Any:
    """Returns the batch with other inputs."""
    if is_pair(batch):
        return rebuild(batch, [inputs, batch[1]])
    is_single = isinstance(batch, _PAIRS) and len(batch) == 1
    return rebuild(batch, [inputs]) if is_single else inputs


def with_targets(batch: Any, targets: Any) -> Any:
    """Returns the batch with other targets; raises TaskError if it has none."""
    if is_pair(batch):
        return rebuild(batch, [batch[0], targets])
    if isinstance(batch, Mapping):
        return {**batch, LABELS: targets}
    raise TaskError(f"a batch of {describe(batch)} has no targets that could be replaced")


def is_pair(batch: Any) -> bool:
    """Returns whether a batch is (inputs, targets)."""
    return isinstance(batch, _PAIRS) and len(batch) == 2


def is_inputs(batch: Any) -> bool:
    """Returns whether a batch has only inputs, as in a prediction: a tensor, or `(inputs,)`."""
    return isinstance(batch, Tensor) or (isinstance(batch, _PAIRS) and len(batch) == 1)


def describe(batch: Any) -> str:
    """Returns a short description of a batch: `tuple of 3 (Tensor, Tensor, str)`."""
    if isinstance(batch, Mapping) and not batch:
        return "nothing: the run has no train data loader"
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(map(repr, batch))}"
    if isinstance(batch, (tuple, list, Microbatches)):
        kinds = ", ".join(type(value).__name__ for value in [*batch][:6])
        return f"{type(batch).__name__} of {len(batch)} ({kinds})"
    if isinstance(batch, Tensor):
        return f"one tensor of shape {shape_text(batch)}"
    return type(batch).__name__


def describe_pair(batch: Any) -> str:
    """Describes a batch, with dtypes and shapes if it is a pair, for plugins that need certain ones."""
    if not is_pair(batch):
        return f"a batch that is {describe(batch)}"
    inputs, targets = (
        f"{value.dtype} of shape {shape_text(value)}"
        if isinstance(value, Tensor)
        else describe(value)
        for value in batch
    )
    return f"a pair of inputs, {inputs}, and targets, {targets}"


def shapes(value: Any) -> str:
    """Returns the dtypes and shapes in a nest as text: `(float32 (4, 3), int64 (4,))`."""
    text = _shapes(value, depth=3)
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def shape_text(tensor: Tensor) -> str:
    """Returns a tensor's shape as text: "(4, 3)"; of a strided nested tensor, "(4, ...)"."""
    if tensor.is_nested and tensor.layout is torch.strided:  # it has no shape (torch 2.13)
        return f"({tensor.size(0)}, ...)"
    return str(tuple(tensor.shape))


def fix_for_no_samples(error: BaseException) -> str:
    """Returns the fix for torch's error for shuffling an empty data set; "" for any other error."""
    if isinstance(error, ValueError) and "got num_samples=0" in str(error):
        return "give the data loader a data set with samples: it has none to shuffle"
    return ""


def rebuild(template: Any, values: list[Any]) -> Any:
    """Returns a tuple, named tuple or list of the same type as `template`, with other values."""
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*values)
    return tuple(values) if isinstance(template, tuple) else values


def _leading_that_fits(batch: Any) -> int:
    # `batch == {}` would fail for an array, which compares each element.
    if isinstance(batch, Mapping) and not batch:
        return 1
    tensors = dict(_tensors_in(batch))
    if not tensors:
        raise TaskError(
            f"a batch of {describe(batch)} holds no tensor whose samples could be counted",
            fix="let the data loader give tensors, for example torch.from_numpy(array), or say what "
            "counts: Task(num_samples=lambda batch: len(batch[0])), or implement the action count_batch",
        )
    # `size(0)`, since a nested tensor of strided layout has no shape.
    size = next(iter(tensors.values())).size(0)
    if any(tensor.size(0) != size for tensor in tensors.values()):
        tensors = _without_entries(batch, tensors)
        size = next(iter(tensors.values())).size(0)
    _require_batch_of_targets(batch, size)
    targets = targets_of(batch)
    sizes = {
        path: tensor.size(0)
        for path, tensor in tensors.items()
        if tensor is not targets or not _is_flattened(targets, tensors.values(), size)
    }
    sizes |= _sizes_of_annotations(batch, size)
    if any(leading_size != size for leading_size in sizes.values()):
        raise _disagree(batch, sizes)
    if _is_annotations(batch) and len(batch) > 2 and len(batch) != size:
        raise _ambiguous(batch, size, next(iter(sizes)))
    if size == 0:
        problem = "has no samples"
        fix = "let the data loader leave empty batches out"
        raise TaskError(f"a batch of {describe(batch)} {problem}", fix=fix)
    return size


def _tensors_in(nest: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor that has a dimension, after the expression that reads it: `batch[0]`.

    Tensors in annotations (see `_is_annotations`) belong to a single sample, so they are left out.
    """
    if isinstance(nest, Tensor):
        if nest.ndim:
            yield path, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _tensors_in(value, f"{path}[{key!r}]")
    elif isinstance(nest, (tuple, list)) and not (path != "batch" and _is_annotations(nest)):
        for idx, value in enumerate(nest):
            yield from _tensors_in(value, f"{path}[{idx}]")


def _without_entries(batch: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a batch, leaving out lists that have a tensor for each sample.

    An example of such a list is the boxes of each image: `(images, [boxes, boxes, ...])`.
    """
    entries = dict(_entries_in(batch))
    batch_tensors = {path: tensor for path, tensor in tensors.items() if path not in entries}
    sizes = {tensor.size(0) for tensor in batch_tensors.values()}
    if len(sizes) != 1 or not sizes.issuperset(entries.values()):
        return tensors
    return batch_tensors


def _entries_in(nest: Any, path: str = "batch") -> Iterator[tuple[str, int]]:
    """Yields each tensor in a list of tensors within the batch, with the length of its list."""
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _entries_in(value, f"{path}[{key!r}]")
    elif isinstance(nest, (tuple, list)):
        is_list_of_tensors = path != "batch" and all(isinstance(value, Tensor) for value in nest)
        for idx, value in enumerate(nest):
            if is_list_of_tensors:
                yield f"{path}[{idx}]", len(nest)
            else:
                yield from _entries_in(value, f"{path}[{idx}]")


def is_list_of_entries(value: Any, num_samples: int) -> bool:
    """Returns whether a list has a tensor for each sample, rather than batches of `num_samples`."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == num_samples
        and all(isinstance(entry, Tensor) for entry in value)
        and any(entry.ndim == 0 or entry.size(0) != num_samples for entry in value)
    )


def _is_annotations(nest: Any) -> bool:
    """Returns whether a value is a list of mappings, such as the annotations of each image."""
    is_list = isinstance(nest, (tuple, list))
    return is_list and bool(nest) and all(isinstance(entry, Mapping) for entry in nest)


def _sizes_of_annotations(nest: Any, size: int, path: str = "batch") -> dict[str, int]:
    """Returns the lengths of annotations by path; if their tensors are batches, the batch size."""
    if path != "batch" and _is_annotations(nest):
        tensors = [tensor for entry in nest for _, tensor in _tensors_in(entry)]
        are_whole = bool(tensors) and all(tensor.size(0) == size for tensor in tensors)
        return {path: size if are_whole else len(nest)}
    sizes: dict[str, int] = {}
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            sizes |= _sizes_of_annotations(value, size, f"{path}[{key!r}]")
    elif isinstance(nest, (tuple, list)):
        for idx, value in enumerate(nest):
            sizes |= _sizes_of_annotations(value, size, f"{path}[{idx}]")
    return sizes


def _is_flattened(targets: Any, tensors: Iterable[Tensor], size: int) -> bool:
    """Returns whether the targets are flattened: N * T of them, for inputs of shape (N, T, ...)."""
    if not isinstance(targets, Tensor):
        return False
    for tensor in tensors:
        if tensor.is_nested:  # a sample's weight would depend on its number of positions
            continue
        counts = list(itertools.accumulate(tensor.shape, operator.mul))
        if tensor is not targets and counts[0] == size and targets.size(0) in counts[1:]:
            return True
    return False


def _require_batch_of_targets(batch: Any, size: int) -> None:
    """Raises TaskError if the target is a number, which shows that the batch is a single sample."""
    targets = targets_of(batch)
    if isinstance(targets, Tensor) and not targets.ndim:
        misfit = "targets of shape ()"
    elif isinstance(targets, (int, float)):
        misfit = f"the target {targets!r}"
    else:
        return
    raise TaskError(
        f"the samples of a batch of {describe(batch)} can't be counted: the first dimension has "
        f"{size}, to which {misfit} can't belong",
        fix=_FIX_FOR_SINGLE,
    )


_FIX_FOR_SINGLE = (
    "with batch_size=None, each item of the data set has to be a whole batch: let the data "
    "loader make batches of samples, DataLoader(dataset, batch_size=32); for another kind of "
    "batch, implement the action count_batch and set Task(metrics=...)"
)


class DifferentSizesError(TaskError):
    """The tensors of a batch have different leading dimensions."""


def _disagree(batch: Any, sizes: Mapping[str, int]) -> TaskError:
    """Returns the error for tensors of different leading dimensions; the fix has a line to paste."""
    descriptions = [f"{path} has {size}" for path, size in sizes.items()]
    if len(descriptions) > _MOST_PARTS:
        descriptions[_MOST_PARTS:] = [f"and {len(descriptions) - _MOST_PARTS} more"]
    return DifferentSizesError(
        f"the samples of a batch of {describe(batch)} can't be counted, since its tensors differ in "
        f"their first dimension: {', '.join(descriptions)}",
        fix=f"say what counts: {_counting_line(batch, sizes)}, or implement the action "
        "count_batch; a single sample isn't a batch: let the data loader make batches, "
        "DataLoader(dataset, batch_size=32)",
    )


def _ambiguous(batch: Any, size: int, path: str) -> TaskError:
    """Returns the error for a list of mappings that could be samples or views of a whole batch."""
    return DifferentSizesError(
        f"the samples of a batch of {describe(batch)} can't be counted: its {len(batch)} mappings may be "
        f"its samples, or each may hold a batch of {size}",
        fix="say what counts: Task(num_samples=lambda batch: len(batch)) where each mapping is a sample, "
        f"len({path}) where each is a batch",
    )


def _counting_line(batch: Any, sizes: Mapping[str, int]) -> str:
    """Returns the argument of Task that counts the samples of a batch whose tensors disagree."""
    inputs = inputs_of(batch)
    targets = targets_of(batch)
    if isinstance(inputs, Tensor) and inputs.is_nested:
        line = "Task(num_samples=lambda batch: batch[0].size(0)"
        if isinstance(targets, Tensor):
            # The loss is a mean over positions, and samples have different numbers of positions.
            line += ", loss_weight=lambda targets: len(targets)"
        return f"{line})"
    if _is_annotations(batch) and _have_one_form(batch):
        return "Task(num_samples=lambda batch: len(batch))"
    return f"Task(num_samples=lambda batch: len({_counted_path(batch, sizes)}))"


def _have_one_form(mappings: Sequence[Mapping[Any, Any]]) -> bool:
    """Returns whether mappings have the same keys, as samples do; inputs and targets may differ."""
    return all(mapping.keys() == mappings[0].keys() for mapping in mappings)


def _counted_path(batch: Any, sizes: Mapping[str, int]) -> str:
    """Returns the expression for the tensor that most likely has an entry for each sample.

    Targets are preferred: the loss is a mean over their entries. Otherwise it is the input. The first
    of several inputs is used, because the hidden state of a recurrent network comes after the input.
    In a mapping, where the edges of a graph may come first, it is the most frequent size.
    """
    targets = "batch[1]" if is_pair(batch) else f"batch[{LABELS!r}]"
    if targets in sizes:
        return targets
    inputs, prefix = (batch[0], "batch[0]") if is_pair(batch) else (batch, "batch")
    input_paths = [path for path in sizes if path.startswith(prefix)]
    if not isinstance(inputs, Mapping) and input_paths:
        return input_paths[0]
    counts = Counter(sizes.values())
    return max(input_paths or sizes, key=lambda path: counts[sizes[path]])


def rows_of(batch: Any) -> int | None:
    """Returns the number of samples of a batch, or None if it has no tensor."""
    return len(batch[0]) if is_listed(batch) else _leading(batch)


def is_listed(batch: Any) -> bool:
    """Returns whether a batch is a pair of lists with an entry for each sample."""
    if not is_pair(batch) or not isinstance(batch[0], (tuple, list)):
        return False
    inputs, targets = batch
    if (num := len(inputs)) == 0:
        return False
    if isinstance(targets, Tensor):
        # If the list held several inputs, each would have as many samples as the targets.
        return (
            targets.ndim > 0
            and targets.size(0) == num
            and any(_leading(value) not in (None, num) for value in inputs)
        )
    return (
        isinstance(targets, (tuple, list))
        and len(targets) == num
        and all(map(is_of_one_sample, targets))
    )


def is_of_one_sample(value: Any) -> bool:
    """Returns whether a value is a single sample's: a number, a text, a mapping of tensors."""
    return isinstance(value, Mapping) or _leading(value) is None


def _leading(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else None
    values = batch.values() if isinstance(batch, Mapping) else batch
    sizes = map(_leading, values) if isinstance(batch, (tuple, list, Mapping)) else iter(())
    return next((size for size in sizes if size is not None), None)


def _shapes(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {shape_text(value)}"
    if not depth or not isinstance(value, Mapping | tuple | list):
        shape = getattr(value, "shape", None)
        dtype = getattr(value, "dtype", None)
        description = "" if shape is None or dtype is None else f" {dtype} {tuple(shape)}"
        return type(value).__name__ + description
    ellipsis = ", ..." if len(value) > _MOST_PARTS else ""
    if isinstance(value, Mapping):
        pairs = [
            f"{key!r}: {_shapes(entry, depth - 1)}" for key, entry in [*value.items()][:_MOST_PARTS]
        ]
        return f"{{{', '.join(pairs)}{ellipsis}}}"
    entries = [_shapes(entry, depth - 1) for entry in value[:_MOST_PARTS]]
    if len(value) > 2 and len(set(entries)) == 1:
        return f"{len(value)} times {entries[0]}"
    return (
        f"({', '.join(entries)}{ellipsis})"
        if isinstance(value, tuple)
        else f"[{', '.join(entries)}{ellipsis}]"
    )
