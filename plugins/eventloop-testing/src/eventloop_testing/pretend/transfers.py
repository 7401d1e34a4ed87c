"""Operators that move values between host and device, and those that make tensors of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eventloop_testing.pretend import copies, lines, memory, private
from eventloop_testing.pretend.tensor import SPECIAL, PretendTensor, run
from eventloop_testing.pretend.waits import waited

aten = torch.ops.aten


def implement() -> None:
    """Registers the operators, also those for which torch skips `__torch_dispatch__`."""
    SPECIAL[aten.copy_.default] = _copy
    SPECIAL[aten._copy_from.default] = _copy_from
    SPECIAL[aten._to_copy.default] = _to_copy
    SPECIAL[aten._local_scalar_dense.default] = _item
    private.implement("empty.memory_format", _making(torch.empty))
    private.implement("empty_strided", _making(torch.empty_strided))
    private.implement("_copy_from", _copy_from)
    private.implement_the_rest(run)


def _making(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(
        *sizes: Any, dtype: Any = None, memory_format: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        private.select(private.NAME if device is None else device)
        options = {} if memory_format is None else {"memory_format": memory_format}
        return PretendTensor(factory(*sizes, dtype=dtype, **options))

    return make


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies within the device, or between it and the host."""
    if not isinstance(source, PretendTensor):
        assert isinstance(target, PretendTensor)
        _from_host(target, source, non_blocking)
        return target
    line = _reading(source)
    if isinstance(target, PretendTensor):
        target.block.write(line)
        target.raw.copy_(source.raw)
    elif non_blocking:
        copies.queue_to_host(target, source.raw)
    else:
        _wait("copy_ to the host", line)
        target.copy_(source.raw)
    return target


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(target, source, non_blocking)


def _from_host(target: PretendTensor, source: Tensor, non_blocking: bool) -> None:
    line = lines.current()
    if non_blocking and memory.is_pinned(source):
        queued = copies.queue_from_host(source)
        target.block.write(line)
        target.block.fill_from(queued)
    else:
        line.advance()
        target.block.write(line)
        if not non_blocking:
            _wait("copy to the device", line)
    target.raw.copy_(source)


def _to_copy(
    source: PretendTensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Tensor:
    """Copies to another type, layout or device."""
    kwargs.pop("pin_memory", None)
    line = _reading(source)
    values: Tensor = aten._to_copy.default(source.raw, **kwargs)
    if device is None or torch.device(device).type != "cpu":
        private.select(private.NAME if device is None else device)
        return PretendTensor(values)
    if non_blocking:
        target = memory.pin(torch.empty_like(values))
        copies.queue_to_host(target, values)
        return target
    _wait("cpu", line)
    return values


def _item(source: PretendTensor) -> Any:
    _wait("item", _reading(source))
    return source.raw.item()


def _reading(source: PretendTensor) -> lines.Line:
    """Queues a read of a tensor on the current line; returns the line."""
    line = lines.current()
    line.advance()
    source.block.read(line)
    return line


def _wait(how: str, line: lines.Line) -> None:
    waited(how)
    lines.host_waits(line.clock())
