"""Models whose parameters no rank holds whole: built without memory, sharded, and then initialized.

Free of hooks. Operations on parameters while the model is built are recorded, and repeated after sharding:
each rank computes one whole parameter at a time, the same on every rank, and keeps its shard. Random
numbers are drawn in the same order, so the weights equal those of a single process.

Source: Feng et al. 2022, torchdistX's `deferred_init`, which records in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # torch has no public dispatch mode (torch 2.13)

from eventloop import SettingError
from eventloop.toolbox import sharded, shards_like

# These operations don't depend on the previous values.
_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_")


class _Write(NamedTuple):
    """An operation that wrote into a parameter, or into a view of it."""

    func: Callable[..., Any]
    param: int
    view: tuple[Any, ...] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Unaware(TorchFunctionMode):
    """Hides that tensors are on the meta device: functions of `nn.init` do nothing on it otherwise."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_meta = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
        return False if func == is_meta else func(*args, **(kwargs or {}))


class DeferredModel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes parameters of models built inside use the meta device; records the writes into them.

    Parameters made of computed values, such as `nn.Parameter(torch.ones(3))`, are created as usual, and
    so are buffers.

    Args:
        records: whether to record writes; False if weights are loaded instead.
    """

    def __init__(self, *, records: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records = records
        self._empty: dict[int, Tensor] = {}
        self._params: dict[int, nn.Parameter] = {}
        self._writes: list[_Write] = []
        self._names: dict[int, str] = {}
        self._unaware = _Unaware()
        self._handle: Any = None

    def __enter__(self) -> Self:
        self._generator = torch.get_rng_state()
        self._unaware.__enter__()  # type: ignore[no-untyped-call]
        # This function reads the values that it draws; private, torch 2.13.
        self._truncated = nn.init._no_grad_trunc_normal_
        nn.init._no_grad_trunc_normal_ = self._truncated_normal
        self._handle = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        self._unaware.__exit__(*error)  # type: ignore[no-untyped-call]
        nn.init._no_grad_trunc_normal_ = self._truncated
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._empty.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = args[0] if func._schema.is_mutable and args else None
        if isinstance(written, Tensor):
            self._empty.pop(_memory(written), None)
            if _memory(written) in self._params:
                self._record(func, written, args[1:], kwargs)
        result = func(*args, **kwargs)
        if func._schema.name.startswith("aten::empty"):
            self._empty[_memory(result)] = result
        return result

    def bind(self, model: nn.Module) -> None:
        """Records the names of the parameters; call it before they are sharded."""
        self._names = {
            _memory(param): name for name, param in model.named_parameters() if param.is_meta
        }

    def fill(self, model: nn.Module) -> None:
        """Writes the weights of a sharded model; collective: every rank must call it.

        The host draws the numbers, from the generator's state when the model was built; afterwards its
        current state is restored.

        Raises:
            SettingError: no recorded operation wrote into a parameter.
        """
        shards = dict(model.named_parameters())
        unwritten = dict.fromkeys(self._names.values())
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generator)
            for write in self._writes:
                name = self._names.get(write.param)
                unwritten.pop(name or "", None)
                # A parameter that the model replaced, for example by a tied one, consumed random numbers, too.
                gone = self._params[write.param]
                _write(
                    torch.empty_like(gone, device="cpu") if name is None else shards[name], write
                )
        if unwritten:
            raise SettingError(
                f"meta: nothing is known to write the weights of {', '.join([*unwritten][:5])}",
                fix="write them in place in the constructor, `nn.init.normal_(self.weight)`, or leave "
                "meta out, and each rank builds the model whole",
            )
        self._writes.clear()

    def _register(self, _module: nn.Module, _name: str, param: Any) -> nn.Parameter | None:
        """Replaces a parameter that nothing was written into by a parameter without memory."""
        if param is None or _memory(param) not in self._empty:
            return None
        del self._empty[_memory(param)]
        deferred = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        self._params[_memory(deferred)] = deferred
        return deferred

    def _truncated_normal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _memory(tensor) not in self._params:
            return self._truncated(tensor, *args, **kwargs)
        self._record(self._truncated, tensor, args, kwargs)
        return tensor

    def _record(self, func: Any, written: Tensor, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._records:
            return
        if any(isinstance(arg, Tensor) and arg.device.type == "meta" for arg in args):
            raise SettingError(
                f"meta: a parameter is computed from others when the model is made, by {func}",
                fix="write numbers into it in place, `nn.init.normal_(self.weight)`, or leave meta "
                "out, and each rank builds the model whole",
            )
        memory = _memory(written)
        whole_of = self._params[memory]
        layout = (written.size(), written.stride(), written.storage_offset())
        is_whole = layout == (whole_of.size(), whole_of.stride(), 0)
        self._writes.append(_Write(func, memory, None if is_whole else layout, args, kwargs))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocates shards that are on the meta device, uninitialized; other tensors stay unchanged."""

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    # Private: torch's public functions also reallocate buffers (torch 2.13).
    model._apply(allocated)  # type: ignore[no-untyped-call]


def give_memory_whole(model: nn.Module, device: torch.device) -> None:
    """Allocates parameters of a model that isn't sharded, uninitialized; tied parameters stay tied."""
    new_params: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param.is_meta and param not in new_params:
                empty = torch.empty_like(param, device=device)
                new_params[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            if param in new_params:
                setattr(module, name, new_params[param])
    model.to(device)  # its buffers


def _write(shard: Tensor, write: _Write) -> None:
    """Repeats a recorded write on a whole parameter, and stores this rank's shard."""
    name = write.func.__name__.partition(".")[0]
    if write.view is None and name in _OVERWRITES:
        value = torch.empty(shard.shape, dtype=shard.dtype)
    else:
        shard_of_param = sharded(shard.detach())
        value = (
            (shard.detach() if shard_of_param is None else shard_of_param.full_tensor())
            .cpu()
            .clone()
        )
    target = value if write.view is None else torch.as_strided(value, *write.view)
    write.func(target, *write.args, **write.kwargs)
    shard.copy_(shards_like(value, shard))


def _memory(tensor: Tensor) -> int:
    """Returns an identifier that is equal for tensors that share memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)  # `data_ptr` is 0 there (torch 2.13)
