"""Tensors of the pretend device: each wraps a tensor of the host, on which it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eventloop_testing.pretend import lines, memory, operators, private
from eventloop_testing.pretend.errors import MixedDevicesError, PretendError
from eventloop_testing.pretend.failing import fail
from eventloop_testing.pretend.waits import waited

# Operators that aren't computed like the others.
SPECIAL: dict[Any, Callable[..., Any]] = {}
DATA: Any = vars(torch.Tensor.__base__)["data"]  # a property in C


_stays_on_host = False


class PretendTensor(Tensor):
    """A tensor of the pretend device.

    Args:
        raw: tensor on the host with the contents of the device's memory.

    Attributes:
        block: the allocation that it shares with its views.
    """

    __torch_function__ = private.NO_TORCH_FUNCTION

    raw: Tensor
    block: memory.Block

    @staticmethod
    def __new__(cls, raw: Tensor) -> PretendTensor:
        """Wraps a tensor of the host, without a copy.

        Raises:
            PretendError: the tensor is sparse.
        """
        if raw.layout is not torch.strided:
            fail(
                PretendError(
                    f"the pretend accelerator has no tensors of layout {raw.layout}, only dense ones: "
                    "a layer whose gradients are sparse takes sparse=False there"
                )
            )
            raw = (
                raw.to_dense()
            )  # lets a backward pass continue to its end, where the error is raised
        tensor: PretendTensor = private.wrapper(cls, raw)
        tensor.raw = raw
        tensor.block = memory.block_of(raw)
        return tensor

    def __init__(self, *_: object) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, *args, **(kwargs or {}))

    # With these two methods a module keeps its parameter objects when it is moved, as on other devices.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: Any, size: Any, stride: Any) -> PretendTensor:
        return PretendTensor(inner["raw"])

    @property
    def data(self) -> Any:
        """The values, without history."""
        return DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, PretendTensor):
            raise MixedDevicesError("x.data = y, with x on the device and y on the host")
        DATA.__set__(self, value)
        self.raw = value.raw
        self.block = value.block

    def data_ptr(self) -> int:
        """Returns the address of the first value."""
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        """Returns the memory, which views share."""
        return self.raw.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Prevents the memory from being reused before a stream has finished with it."""
        self.block.record_stream(stream.line)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only tensors without history can be copied deeply")
            with torch.no_grad():
                copied = self.detach().clone().requires_grad_(self.requires_grad)
            _be_parameter(copied, getattr(self, "_is_param", False))
            memo[id(self)] = copied
            copied.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_param = getattr(self, "_is_param", False)
        return _rebuilt, (self.detach().cpu(), self.requires_grad, is_param)


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an operator that takes or makes tensors of the device.

    Raises:
        MixedDevicesError: it also has tensors on the host among its arguments.
        RaceError: another stream may not have finished with an argument.
    """
    if func in SPECIAL:
        return SPECIAL[func](*args, **kwargs)
    operator = operators.described(func)
    line = lines.current()
    if operator.has_to_wait or operators.indexes_with_mask(func, args):
        waited(operator.name)
        lines.host_waits(line.clock())
    from_host = operators.taken_from_host(func, args)
    line.advance()
    if from_host.has_to_wait:
        waited("copy to the device")
        lines.host_waits(line.clock())
    call = _Call(func, line, operator.takes_numbers, from_host.ids)
    raw_args = [call.raw(arg, idx in operator.written) for idx, arg in enumerate(args)]
    raw_kwargs = {name: call.raw(arg, name in operator.written) for name, arg in kwargs.items()}
    stays_on_host = operators.point_to_host(raw_kwargs)
    is_pinned = bool(raw_kwargs.pop("pin_memory", None))
    result = operators.compute(func, operator, raw_args, raw_kwargs)
    if operator.changes_shape:
        _follow(args[0])
    for name in operator.outs:
        for out in kwargs[name] if isinstance(kwargs[name], (list, tuple)) else [kwargs[name]]:
            _follow(out)
    if stays_on_host:
        return memory.pin(result) if is_pinned else result
    return call.wrapped(result)


class _Call:
    """A call of an operator: unwraps the arguments, and wraps the results."""

    def __init__(
        self, func: Any, line: lines.Line, takes_numbers: bool, from_host: frozenset[int]
    ) -> None:
        self._func = func
        self._line = line
        self._takes_numbers = takes_numbers
        self._from_host = from_host
        self._wrappers: dict[int, PretendTensor] = {}

    def raw(self, value: Any, is_written: bool) -> Any:
        """Returns an argument with tensors of the device replaced by the wrapped host tensors."""
        if isinstance(value, PretendTensor):
            block = value.block
            (block.write if is_written else block.read)(self._line)
            self._wrappers[id(value.raw)] = value
            return value.raw
        if isinstance(value, Tensor):
            is_number = self._takes_numbers and value.dim() == 0 and not is_written
            if is_number or id(value) in self._from_host:
                return value
            fail(
                MixedDevicesError(
                    f"{self._func} was given a tensor of the host, of shape {tuple(value.shape)}, "
                    "and others of the device; move it with .to(device) before"
                )
            )
            return value
        if isinstance(value, (list, tuple)):
            return [self.raw(nested, is_written) for nested in value]
        return value

    def wrapped(self, value: Any) -> Any:
        """Returns a result as tensors of the device; a returned argument as the same object."""
        if isinstance(
            value, PretendTensor
        ):  # from `to` with a device, if torch doesn't decompose it
            return value
        if isinstance(value, Tensor):
            wrapper = self._wrappers.get(id(value))
            return PretendTensor(value) if wrapper is None else wrapper
        if isinstance(value, (list, tuple)):
            return type(value)([self.wrapped(nested) for nested in value])
        return value


def _follow(tensor: PretendTensor) -> None:
    """Updates a tensor to the shape of the tensor that it wraps."""
    raw = tensor.raw
    if tensor.size() != raw.size() or tensor.stride() != raw.stride():
        DATA.__set__(tensor, PretendTensor(raw))
    tensor.block = memory.block_of(raw)


@contextmanager
def staying_on_host(is_on: bool) -> Iterator[None]:
    """Makes tensors of the device unpickle as tensors on the host inside its context, if `is_on`."""
    global _stays_on_host
    stayed_on_host = _stays_on_host
    _stays_on_host = is_on
    try:
        yield
    finally:
        _stays_on_host = stayed_on_host


def _rebuilt(values: Tensor, requires_grad: bool, is_param: bool) -> Tensor:
    if _stays_on_host:
        return torch.nn.Parameter(values, requires_grad) if is_param else values
    tensor = values.to(private.NAME).requires_grad_(requires_grad)
    _be_parameter(tensor, is_param)
    return tensor


def _be_parameter(tensor: Any, is_param: bool) -> None:
    if is_param:
        tensor._is_param = True  # read by isinstance(tensor, nn.Parameter)


torch.serialization.add_safe_globals([_rebuilt])  # so that `torch.load` reads them in its safe mode
