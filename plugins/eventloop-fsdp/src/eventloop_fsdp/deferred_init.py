"""Models whose parameters no rank holds whole: made without memory, sharded, and then filled in.

Free of hooks. What a model does to its parameters while it is made is recorded, and done once it is
sharded: one parameter at a time is whole, on every rank alike, and each rank keeps its shard. The random
numbers are drawn in the same order, and so the weights are those of one process.

Source: Feng et al. 2022, torchdistX's `deferred_init`, which records in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public one (torch 2.13)

from eventloop import SettingError
from eventloop.toolbox import sharded, shards_like

# What these write doesn't depend on what was there.
_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_")


class _Write(NamedTuple):
    """An operation that wrote into a parameter, or into a view of it."""

    func: Callable[..., Any]
    param: int
    view: tuple[Any, ...] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Unaware(TorchFunctionMode):
    """Hides that tensors are on the meta device, since functions of `nn.init` do nothing there then."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_meta = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
        return False if func == is_meta else func(*args, **(kwargs or {}))


class DeferredModel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has parameters of models made inside lie on the meta device; records what is written into them.

    Those that are made of computed values, `nn.Parameter(torch.ones(3))` say, are as they are made, and
    so are buffers.

    Args:
        records: whether weights are to be written as recorded; not where they are loaded.
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
        # It looks at what it draws; private, as of torch 2.13.
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
        """Learns the names of the parameters; to be called before they are sharded."""
        self._names = {_memory(one): name for name, one in model.named_parameters() if one.is_meta}

    def fill(self, model: nn.Module) -> None:
        """Writes the weights of a sharded model; collective: every rank must call it.

        The host draws them, from where its generator stood when the model was made, and it stands
        afterwards where it stands now.

        Raises:
            SettingError: nothing that is known was written into a parameter.
        """
        shards = dict(model.named_parameters())
        left = dict.fromkeys(self._names.values())
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generator)
            for one in self._writes:
                name = self._names.get(one.param)
                left.pop(name or "", None)
                # One that the model has given up, for a tied one say, has drawn its numbers, too.
                gone = self._params[one.param]
                _write(torch.empty_like(gone, device="cpu") if name is None else shards[name], one)
        if left:
            raise SettingError(
                f"meta: nothing is known to write the weights of {', '.join([*left][:5])}",
                fix="write them in place in the constructor, `nn.init.normal_(self.weight)`, or leave "
                "meta out, and each rank builds the model whole",
            )
        self._writes.clear()

    def _register(self, _module: nn.Module, _name: str, param: Any) -> nn.Parameter | None:
        """Puts a parameter without memory in the place of one that nothing was written into."""
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
        if any(isinstance(one, Tensor) and one.device.type == "meta" for one in args):
            raise SettingError(
                f"meta: a parameter is computed from others when the model is made, by {func}",
                fix="write numbers into it in place, `nn.init.normal_(self.weight)`, or leave meta "
                "out, and each rank builds the model whole",
            )
        memory = _memory(written)
        whole_of = self._params[memory]
        place = (written.size(), written.stride(), written.storage_offset())
        is_whole = place == (whole_of.size(), whole_of.stride(), 0)
        self._writes.append(_Write(func, memory, None if is_whole else place, args, kwargs))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocates shards that are on the meta device, with nothing in them; others stay as they are."""

    def place(one: Tensor) -> Tensor:
        return torch.empty_like(one, device=device) if one.is_meta else one

    # torch has no public one that leaves buffers as they are (torch 2.13).
    model._apply(place)  # type: ignore[no-untyped-call]


def give_memory_whole(model: nn.Module, device: torch.device) -> None:
    """Allocates parameters of a model that isn't sharded, likewise; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param.is_meta and param not in made:
                empty = torch.empty_like(param, device=device)
                made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            if param in made:
                setattr(module, name, made[param])
    model.to(device)  # its buffers


def _write(shard: Tensor, one: _Write) -> None:
    """Writes into a parameter what was written into it whole."""
    name = one.func.__name__.partition(".")[0]
    if one.view is None and name in _OVERWRITES:
        value = torch.empty(shard.shape, dtype=shard.dtype)
    else:
        held = sharded(shard.detach())
        value = (shard.detach() if held is None else held.full_tensor()).cpu().clone()
    target = value if one.view is None else torch.as_strided(value, *one.view)
    one.func(target, *one.args, **one.kwargs)
    shard.copy_(shards_like(value, shard))


def _memory(tensor: Tensor) -> int:
    """Returns what tensors have in common that share memory, on the meta device, too."""
    return int(tensor.untyped_storage()._cdata)  # `data_ptr` is 0 there (torch 2.13)
