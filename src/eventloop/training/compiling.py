"""Compiling: forward and loss become one region, or each layer its own, with the hooks outside."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eventloop.errors import SettingError, closest, counted
from eventloop.fixes import as_set

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.plugin.order import Implementation
    from eventloop.plugin.registry import Registry
    from eventloop.state import State

_ACTIONS = ("forward", "loss")
# A plugin that implements one of these may need the graph of the outputs, or change them.
_SEES_OUTPUTS = ("forward", "after_forward", "before_loss", "loss", "after_loss", "before_backward",
                 "backward")  # fmt: skip
_PARAMETERS = inspect.signature(torch.compile).parameters
_OPTIONS = _PARAMETERS.keys() - {"model", "disable"}
# Trainers in one process run the same code, whose recompilations would count together (torch 2.13).
_DEFAULTS = {"isolate_recompiles": True} if "isolate_recompiles" in _PARAMETERS else {}
# torch.compile generalizes a kernel when it meets a second shape: which shape came first, and what was
# compiled before, is another history in a process that resumes (torch 2.13).
_NO_BITS = (
    "a resumed run may differ in its last bits, for kernels depend on the order in which a process "
    "first meets the shapes of its batches"
)
_LAYERS = "layers"  # in the mapping of options; not one of torch's
# In these modes the next run writes into the results of the last one.
_REUSING_MODES = ("reduce-overhead", "max-autotune")
# They hold modules that follow each other; a ModuleList has no forward of its own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_HAS_LIMIT = "recompile_limit" in _PARAMETERS  # torch 2.13
# Of one layer, as torch has it: training and evaluation, and shapes of batches.
_NUM_VARIANTS = 8


class Compiled:
    """Replaces the owners of `forward` and `loss` by compiled functions; an observer.

    In training, `forward` also computes the loss, in the same compiled region, and keeps it. `loss`
    returns it if outputs and batch haven't changed; otherwise, for example with other targets, it
    computes the loss from the outputs, uncompiled. Events and wrappers run around both as before.
    An owner in a plugin isn't compiled, since it may have side effects.

    If the model is wrapped, for example in DDP, only the model inside is compiled. If layers are
    sharded, or the setting asks for it, each layer is compiled by itself, in place, and the code
    around the layers, which gathers their weights, isn't. Names in the state dict never change.

    A `train_batch` that isn't the core's calls the model in updates of its own: the model, or each
    layer, is compiled in place. Passes without gradients, that sample say, aren't compiled then.

    Args:
        assembly: who owns what.
        state: with `compile` on in its settings.
    """

    def __init__(self, assembly: Registry, state: State) -> None:
        self._state = state
        self._options = compile_options(state.settings)
        self._is_by_layer = by_layer(state.settings)
        self._is_decided = False  # a model is sharded after this
        owners = {action: assembly.asked(action)[-1] for action in _ACTIONS}
        self._own = {name: one for name, one in owners.items() if one.plugin.role != "algorithm"}
        self._is_watched = any(
            one.plugin.role in ("task", "algorithm") and one not in owners.values()
            for hook in _SEES_OUTPUTS
            for one in assembly.implementations[hook]
        )
        if "forward" not in self._own:
            raise SettingError(
                "compile has no effect: a plugin owns forward, and plugins aren't compiled",
                plugin=owners["forward"].plugin.origin,
                fix="leave compile out, or let the plugin compile what it calls",
            )
        trains = assembly.asked("train_batch")[-1]
        self._trains = None if trains.plugin.role == "core" else trains
        self._is_called = False
        self._forward_alone = self._compile(self._own["forward"].function)
        can_join = len(self._own) == len(_ACTIONS)
        self._region = self._compile(self._joined()) if can_join else None
        self._is_reused = self._options.get("mode") in _REUSING_MODES
        self._is_compiled_inside = False
        self._computed: _Computed | None = None

    @property
    def note(self) -> str:
        """What the header says."""
        return f"{self._what}; {_NO_BITS}"

    @property
    def _what(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self._options.items())
        if num_sharded := len(sharded_layers(self._state.wrapped_model)):
            return f"compile: {counted(num_sharded, 'sharded layer')}, each by itself{options}"
        if self._is_by_layer:
            num_layers = len(repeated_layers(self._state.model))
            return f"compile: {counted(num_layers, 'layer')}, each by itself{options}"
        if self._trains is not None:
            return f"compile: the model, where updates call it{options}"
        if self._is_wrapped:
            return f"compile: the model inside {type(self._state.wrapped_model).__name__}{options}"
        if self._region is not None:
            return f"compile: forward and loss in one region{options}"
        return f"compile: forward without the loss{options}"

    def observed(self, one: Implementation) -> Implementation:
        """Returns the implementation, compiled where it is an owner that can be."""
        if one is self._own.get("forward"):
            return replace(one, function=self._forward)
        if one is self._own.get("loss"):
            return replace(one, function=self._loss)
        if one is self._trains:
            return replace(one, function=functools.partial(self._train_batch, one.function))
        return one

    @property
    def _is_wrapped(self) -> bool:
        return self._state.wrapped_model is not self._state.model

    def _forward(self, state: State) -> Any:
        if not self._is_decided:
            self._decide(state)
        if self._is_by_layer:
            return self._own["forward"].function(state)
        if self._is_wrapped and state.microbatch is not None:
            if not self._is_compiled_inside:
                self._compile_inside(state)
            return self._own["forward"].function(state)
        # Evaluation and prediction need no loss.
        if self._region is None or state.microbatch is None:
            return self._forward_alone(state)
        self._computed = None
        outputs, loss = self._region(state)
        if self._is_reused and isinstance(loss, Tensor):
            loss = loss.clone()
        self._computed = _Computed(state.microbatch, outputs, loss)
        return outputs

    def _decide(self, state: State) -> None:
        layers = layers_of(state)
        compile_layers(layers, self._compile)
        # Where another model takes the place for once, the layers are still to come.
        self._is_decided = bool(layers) or not self._is_by_layer
        self._is_by_layer = self._is_by_layer or bool(layers)
        if self._trains is not None and not layers:
            self._compile_calls(state.model)

    def _compile_calls(self, model: nn.Module) -> None:
        """Has the model run compiled where gradients are wanted: see `compile_layers`."""
        compiled = self._compile(_run)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return _run(model, *args, **kwargs)
            self._is_called = True
            return compiled(model, *args, **kwargs)

        model._compiled_call_impl = call

    def _train_batch(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self._is_decided:
            self._decide(self._state)
        stepped = function(*args)
        if stepped is not False and not (self._is_called or self._is_by_layer):
            assert self._trains is not None
            raise SettingError(
                "compile has no effect: train_batch made an update in which it didn't call state.model",
                plugin=self._trains.plugin.origin,
                fix="leave compile out, and compile the networks in the task: "
                "`model.discriminator.compile()`",
            )
        return stepped

    def _loss(self, state: State) -> Any:
        computed = self._computed
        self._computed = None
        if computed is not None and computed.still_holds(state):
            return computed.loss
        return self._own["loss"].function(state)

    def _joined(self) -> Callable[[State], tuple[Any, Any]]:
        forward = self._own["forward"].function
        loss = self._own["loss"].function
        is_watched = self._is_watched

        def region(state: State) -> tuple[Any, Any]:
            outputs = state.outputs = forward(state)
            found = loss(state)
            # Without a graph of their own the outputs' gradient isn't computed beside the loss's.
            if not is_watched and isinstance(outputs, Tensor):
                outputs = outputs.detach()
            state.outputs = None
            return outputs, found

        return region

    def _compile_inside(self, state: State) -> None:
        """Has the wrapper call a compiled model, whose parameters are the same."""
        for name, module in state.wrapped_model.named_children():
            if module is state.model:
                setattr(state.wrapped_model, name, self._compile(module))
                self._is_compiled_inside = True  # not where another model takes the place for once

    def _compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        options = _DEFAULTS | options | self._options
        try:
            compiled: Callable[..., Any] = torch.compile(function, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            raise SettingError(
                f"compile={self._options}: torch.compile says: {error}",
                fix="set compile to true, or fix its options",
            ) from error
        return compiled


class _Computed:
    """A loss, and what it was computed from."""

    def __init__(self, microbatch: Any, outputs: Any, loss: Any) -> None:
        self.loss = loss
        self._inputs = (microbatch, outputs)
        self._seen = _tensors(self._inputs)

    def still_holds(self, state: State) -> bool:
        """Returns whether the microbatch and the outputs were neither replaced nor written to."""
        if state.microbatch is not self._inputs[0] or state.outputs is not self._inputs[1]:
            return False
        now = _tensors(self._inputs)
        return len(now) == len(self._seen) and all(
            tensor is seen and version == then
            for (tensor, version), (seen, then) in zip(now, self._seen, strict=True)
        )


def compiled_of(assembly: Registry, state: State) -> tuple[Compiled, ...]:
    """Returns the observer that compiles, where the setting wants it.

    Raises:
        SettingError: torch.compile can't take an option, or would have nothing to compile.
    """
    return () if state.settings.compile is False else (Compiled(assembly, state),)


def by_layer(settings: Settings) -> bool:
    """Returns whether the setting wants each layer compiled by itself.

    Raises:
        SettingError: it says of layers something else.
    """
    if not isinstance(settings.compile, dict):
        return settings.compile == "layers"
    wanted = settings.compile.get(_LAYERS, False)
    if not isinstance(wanted, bool):
        raise SettingError(
            f"compile: {_LAYERS} is true or false, not {wanted!r}",
            fix="compile={'layers': True}; which they are is found, or said to what shards them",
        )
    return wanted


def layers_of(state: State) -> list[nn.Module]:
    """Returns the layers to compile, each by itself, of a model that is wrapped; none otherwise."""
    layers = sharded_layers(state.wrapped_model)
    return layers or (repeated_layers(state.model) if by_layer(state.settings) else [])


def require_layers(state: State) -> None:
    """Checks that there are layers to compile, where the setting wants each by itself.

    Raises:
        SettingError: there are none.
    """
    if by_layer(state.settings) and not layers_of(state):
        raise SettingError(
            "compile by layers has no effect: the model has no layers that repeat in an nn.Sequential, "
            "ModuleList or ModuleDict",
            fix="compile all of it, " + as_set(compile=True),
        )


def compile_options(settings: Settings) -> dict[str, Any]:
    """Returns the options of torch.compile that the setting holds.

    Raises:
        SettingError: torch.compile can't take an option.
    """
    held = settings.compile if isinstance(settings.compile, dict) else {}
    options = {name: value for name, value in held.items() if name != _LAYERS}
    for name in options:
        if name not in _OPTIONS:
            raise SettingError(
                f"compile: torch.compile has no option {name!r}{closest(name, _OPTIONS)}",
                fix=f"one of {', '.join(sorted(_OPTIONS))}, as in compile={{'dynamic': True}}",
            )
    backend = options.get("backend", "inductor")
    known = torch.compiler.list_backends(exclude_tags=()) if options else [backend]
    if isinstance(backend, str) and backend not in known:
        raise SettingError(
            f"compile: torch.compile has no backend {backend!r}{closest(backend, known)}",
            fix=f"one of {', '.join(known)}",
        )
    return options


def _tensors(nest: Any) -> list[tuple[Tensor, int]]:
    """Returns the tensors of a nest, attributes of objects included, with their versions."""
    if isinstance(nest, Tensor):
        return [(nest, nest._version)]
    if isinstance(nest, Mapping):
        values: Any = nest.values()
    elif isinstance(nest, (tuple, list)):
        values = nest
    else:
        values = getattr(nest, "__dict__", {}).values()
    return [found for value in values for found in _tensors(value)]


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers, such as a transformer's blocks, in order.

    They are the outermost members of an nn.Sequential, ModuleList or ModuleDict that have parameters
    and a sibling of their class.
    """
    return list(dict.fromkeys(_repeated(model)))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    members = list(module.children())
    classes = Counter(map(type, members))
    for one in members:
        is_container = isinstance(one, _CONTAINERS)
        repeats = isinstance(module, _CONTAINERS) and classes[type(one)] > 1
        if repeats and not is_container and any(True for _ in one.parameters()):
            yield one
        else:
            yield from _repeated(one)


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 shards separately, or the model if it is sharded as a whole."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nothing is sharded
    if fsdp is None:
        return []
    found = [one for one in model.modules() if isinstance(one, fsdp.FSDPModule)]
    return [one for one in found if one is not model] or found


def compile_layers(
    layers: Sequence[nn.Module], compiler: Callable[..., Callable[..., Any]]
) -> None:
    """Has layers run compiled, in place; those that print alike share what is compiled.

    Names in their state dicts stay, and their hooks are called.

    Args:
        compiler: `torch.compile`; takes a function and options.
    """
    alike: dict[tuple[type, str], list[nn.Module]] = {}
    for one in layers:
        alike.setdefault((type(one), repr(one)), []).append(one)
    for same in alike.values():
        # If forward uses a number that differs by layer, such as its index, each layer is compiled.
        limit = {"recompile_limit": _NUM_VARIANTS * len(same)} if _HAS_LIMIT else {}
        compiled = compiler(_run, **limit)
        for one in same:
            # The attribute that `Module.compile` sets, which would compile every layer; a copy of
            # the module is without it (torch 2.13).
            one._compiled_call_impl = functools.partial(compiled, one)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # What `__call__` calls, hooks included (torch 2.13).
    return layer._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
