"""Reads of tensors by the host: where a value is needed, the host waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import Tensor

# Private, but torch's documented way to see every operation, and without a public name
# (torch 2.13).
from torch.utils._python_dispatch import TorchDispatchMode

_READ = "aten::_local_scalar_dense"
# They read without an operation that could be seen.
_METHODS = {"tolist": "tolist", "numpy": "numpy", "__repr__": "print"}


class HostReads:
    """Reports every value that is read from a tensor inside its `with`; may be nested.

    On a CUDA device each read waits until everything before it is computed; on the CPU nothing
    waits, but the same calls are seen.

    Args:
        found: called at each read with the tensor and with how it is read: "item", "tolist",
            "numpy", "print".
    """

    def __init__(self, found: Callable[[Tensor, str], None]) -> None:
        self._found = found
        self._mode = _Operations(found)
        self._depth = 0
        self._is_reading = False
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1:
            for name, how in _METHODS.items():
                self._kept[name] = vars(Tensor).get(name)
                setattr(Tensor, name, self._told(how, getattr(Tensor, name)))
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            for name, method in self._kept.items():
                if method is None:
                    delattr(Tensor, name)  # an inherited one shows again
                else:
                    setattr(Tensor, name, method)

    def _told(self, how: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_reading:  # to print reads entries one by one
                return method(tensor, *args, **kwargs)
            self._is_reading = True
            try:
                self._found(tensor, how)
                return method(tensor, *args, **kwargs)
            finally:
                self._is_reading = False

        return read


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Callable[[Tensor, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name() == _READ:
            self._found(args[0], "item")
        return func(*args, **(kwargs or {}))
