"""Compilation of the model: forward and loss in one region, or layer by layer, without the hooks."""

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
# A plugin that implements any of these hooks may use the graph of the outputs or change them.
_SEES_OUTPUTS = ("forward", "after_forward", "before_loss", "loss", "after_loss", "before_backward",
                 "backward")  # fmt: skip
_PARAMETERS = inspect.signature(torch.compile).parameters
_OPTIONS = _PARAMETERS.keys() - {"model", "disable"}
# All trainers of a process share this code. Without isolation, their recompilations would add up to
# one limit, after which torch stops compiling (torch 2.13).
_DEFAULTS = {"isolate_recompiles": True} if "isolate_recompiles" in _PARAMETERS else {}
# torch.compile generalizes a kernel when it sees a second shape, so the kernels depend on which
# shapes came first. A resumed process sees them in another order (torch 2.13).
_NO_BITS = (
    "a resumed run may differ in its last bits, because kernels depend on the order in which a process "
    "first sees the shapes of its batches"
)
_LAYERS = "layers"  # an option of eventloop, not of torch.compile
# In these modes, CUDA graphs overwrite the results of the previous call.
_REUSING_MODES = ("reduce-overhead", "max-autotune")
# Containers of layers; a ModuleList can't be compiled, since it has no forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_HAS_LIMIT = "recompile_limit" in _PARAMETERS  # torch 2.13
# Recompilations per layer, torch's default: for training and evaluation, and shapes of batches.
_NUM_VARIANTS = 8


class Compiled:
    """An observer that replaces the owners of `forward` and `loss` by compiled functions.

    In training, `forward` also computes the loss in the same compiled region and caches it. `loss`
    returns the cached loss if outputs and batch haven't changed. Otherwise, for example if a plugin
    replaced the targets, it computes the loss from the outputs, uncompiled. Events and wrappers run
    around both as usual. A plugin's `forward` or `loss` isn't compiled, since it may have side effects.

    If the model is wrapped, for example in DDP, only the inner model is compiled. If layers are
    sharded, or the setting requests it, each layer is compiled separately and in place; the code
    between the layers, which gathers sharded weights, isn't compiled. Names in the state dict never
    change.

    If a plugin or the task owns `train_batch`, it calls the model in its own updates, so the model, or
    each layer, is compiled in place. Passes without gradients, such as sampling, stay uncompiled.

    Args:
        assembly: the registered hook implementations.
        state: the state of the run; its setting `compile` isn't False.
    """

    def __init__(self, assembly: Registry, state: State) -> None:
        self._state = state
        self._options = compile_options(state.settings)
        self._is_by_layer = by_layer(state.settings)
        # Plugins shard the model after the observers are built, so layers are looked for in the first
        # pass.
        self._is_decided = False
        owners = {action: assembly.asked(action)[-1] for action in _ACTIONS}
        self._compilable = {
            action: owner for action, owner in owners.items() if owner.plugin.role != "algorithm"
        }
        self._outputs_need_graph = any(
            implementation.plugin.role in ("task", "algorithm")
            and implementation not in owners.values()
            for hook in _SEES_OUTPUTS
            for implementation in assembly.implementations[hook]
        )
        if "forward" not in self._compilable:
            raise SettingError(
                "compile has no effect: a plugin owns forward, and plugins aren't compiled",
                plugin=owners["forward"].plugin.origin,
                fix="remove compile, or call torch.compile in the plugin",
            )
        train_batch = assembly.asked("train_batch")[-1]
        self._train_batch_owner = None if train_batch.plugin.role == "core" else train_batch
        self._is_called = False
        self._forward_without_loss = self._compile(self._compilable["forward"].function)
        can_join = len(self._compilable) == len(_ACTIONS)
        self._region = self._compile(self._forward_and_loss()) if can_join else None
        self._reuses_results = self._options.get("mode") in _REUSING_MODES
        self._is_compiled_inside = False
        self._cached_loss: _CachedLoss | None = None

    @property
    def note(self) -> str:
        """The note in the header of the run."""
        return f"{self._description}; {_NO_BITS}"

    @property
    def _description(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self._options.items())
        if num_sharded := len(sharded_layers(self._state.wrapped_model)):
            return f"compile: {counted(num_sharded, 'sharded layer')}, each compiled separately{options}"
        if self._is_by_layer:
            num_layers = len(repeated_layers(self._state.model))
            return f"compile: {counted(num_layers, 'layer')}, each compiled separately{options}"
        if self._train_batch_owner is not None:
            return f"compile: the model, where updates call it{options}"
        if self._is_wrapped:
            return f"compile: the model inside {type(self._state.wrapped_model).__name__}{options}"
        if self._region is not None:
            return f"compile: forward and loss in one region{options}"
        return f"compile: forward without the loss{options}"

    def observed(self, implementation: Implementation) -> Implementation:
        """Returns the implementation with a compiled function if it owns an action to compile."""
        if implementation is self._compilable.get("forward"):
            return replace(implementation, function=self._forward)
        if implementation is self._compilable.get("loss"):
            return replace(implementation, function=self._loss)
        if implementation is self._train_batch_owner:
            function = functools.partial(self._train_batch, implementation.function)
            return replace(implementation, function=function)
        return implementation

    @property
    def _is_wrapped(self) -> bool:
        return self._state.wrapped_model is not self._state.model

    def _forward(self, state: State) -> Any:
        if not self._is_decided:
            self._decide(state)
        if self._is_by_layer:
            return self._compilable["forward"].function(state)
        if self._is_wrapped and state.microbatch is not None:
            if not self._is_compiled_inside:
                self._compile_inside(state)
            return self._compilable["forward"].function(state)
        # Evaluation and prediction need no loss.
        if self._region is None or state.microbatch is None:
            return self._forward_without_loss(state)
        self._cached_loss = None
        outputs, loss = self._region(state)
        if self._reuses_results and isinstance(loss, Tensor):
            loss = loss.clone()
        self._cached_loss = _CachedLoss(state.microbatch, outputs, loss)
        return outputs

    def _decide(self, state: State) -> None:
        layers = layers_of(state)
        compile_layers(layers, self._compile)
        # A plugin may put another model in the place of this one for a single pass; the layers of the
        # real model are then still to be found.
        self._is_decided = bool(layers) or not self._is_by_layer
        self._is_by_layer = self._is_by_layer or bool(layers)
        if self._train_batch_owner is not None and not layers:
            self._compile_calls(state.model)

    def _compile_calls(self, model: nn.Module) -> None:
        """Makes calls of the model with gradients run compiled, as `compile_layers` does."""
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
            assert self._train_batch_owner is not None
            raise SettingError(
                "compile has no effect: train_batch made an update without calling state.model",
                plugin=self._train_batch_owner.plugin.origin,
                fix="remove compile, and compile the networks in the task: "
                "`model.discriminator.compile()`",
            )
        return stepped

    def _loss(self, state: State) -> Any:
        cached = self._cached_loss
        self._cached_loss = None
        if cached is not None and cached.is_valid(state):
            return cached.loss
        return self._compilable["loss"].function(state)

    def _forward_and_loss(self) -> Callable[[State], tuple[Any, Any]]:
        """Returns a function of the State that returns the outputs and the loss."""
        compute_outputs = self._compilable["forward"].function
        compute_loss = self._compilable["loss"].function
        outputs_need_graph = self._outputs_need_graph

        def region(state: State) -> tuple[Any, Any]:
            outputs = state.outputs = compute_outputs(state)
            loss = compute_loss(state)
            # Detached outputs spare the compiled backward a second gradient, that of the outputs.
            if not outputs_need_graph and isinstance(outputs, Tensor):
                outputs = outputs.detach()
            state.outputs = None
            return outputs, loss

        return region

    def _compile_inside(self, state: State) -> None:
        """Replaces the model inside the wrapper by a compiled model with the same parameters."""
        for name, module in state.wrapped_model.named_children():
            if module is state.model:
                setattr(state.wrapped_model, name, self._compile(module))
                # Not set if a plugin has put another model in place of this one for a single pass.
                self._is_compiled_inside = True

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


class _CachedLoss:
    """A loss with the microbatch and the outputs that it was computed from."""

    def __init__(self, microbatch: Any, outputs: Any, loss: Any) -> None:
        self.loss = loss
        self._inputs = (microbatch, outputs)
        self._saved_versions = _tensors_with_versions(self._inputs)

    def is_valid(self, state: State) -> bool:
        """Returns whether the microbatch and the outputs were neither replaced nor written to."""
        if state.microbatch is not self._inputs[0] or state.outputs is not self._inputs[1]:
            return False
        current_versions = _tensors_with_versions(self._inputs)
        if len(current_versions) != len(self._saved_versions):
            return False
        for current, saved in zip(current_versions, self._saved_versions, strict=True):
            # Tensors are compared by identity, their versions by value.
            if current[0] is not saved[0] or current[1] != saved[1]:
                return False
        return True


def compiled_of(assembly: Registry, state: State) -> tuple[Compiled, ...]:
    """Returns the observer that compiles, or () if the setting `compile` is False.

    Raises:
        SettingError: torch.compile doesn't accept an option, or there is nothing to compile.
    """
    return () if state.settings.compile is False else (Compiled(assembly, state),)


def by_layer(settings: Settings) -> bool:
    """Returns whether the setting requests that each layer is compiled separately.

    Raises:
        SettingError: the option "layers" isn't a bool.
    """
    if not isinstance(settings.compile, dict):
        return settings.compile == "layers"
    is_requested = settings.compile.get(_LAYERS, False)
    if not isinstance(is_requested, bool):
        raise SettingError(
            f"compile: {_LAYERS} is true or false, not {is_requested!r}",
            fix="compile={'layers': True}; layers that repeat or are sharded are found automatically",
        )
    return is_requested


def layers_of(state: State) -> list[nn.Module]:
    """Returns the layers to compile separately: sharded ones, or repeated ones if the setting says so.

    The model must be wrapped already.
    """
    layers = sharded_layers(state.wrapped_model)
    return layers or (repeated_layers(state.model) if by_layer(state.settings) else [])


def require_layers(state: State) -> None:
    """Checks that the model has layers, if the setting requests that each is compiled separately.

    Raises:
        SettingError: the model has no layers.
    """
    if by_layer(state.settings) and not layers_of(state):
        raise SettingError(
            "compile by layers has no effect: the model has no layers that repeat in an nn.Sequential, "
            "ModuleList or ModuleDict",
            fix="compile the whole model, " + as_set(compile=True),
        )


def compile_options(settings: Settings) -> dict[str, Any]:
    """Returns the options of torch.compile in the setting `compile`.

    Raises:
        SettingError: torch.compile doesn't accept an option.
    """
    setting = settings.compile if isinstance(settings.compile, dict) else {}
    options = {name: value for name, value in setting.items() if name != _LAYERS}
    for name in options:
        if name not in _OPTIONS:
            raise SettingError(
                f"compile: torch.compile has no option {name!r}{closest(name, _OPTIONS)}",
                fix=f"one of {', '.join(sorted(_OPTIONS))}, as in compile={{'dynamic': True}}",
            )
    backend = options.get("backend", "inductor")
    backends = torch.compiler.list_backends(exclude_tags=()) if options else [backend]
    if isinstance(backend, str) and backend not in backends:
        raise SettingError(
            f"compile: torch.compile has no backend {backend!r}{closest(backend, backends)}",
            fix=f"one of {', '.join(backends)}",
        )
    return options


def _tensors_with_versions(nest: Any) -> list[tuple[Tensor, int]]:
    """Returns the tensors of a nest and of its objects' attributes, each with its version counter."""
    if isinstance(nest, Tensor):
        return [(nest, nest._version)]
    if isinstance(nest, Mapping):
        values: Any = nest.values()
    elif isinstance(nest, (tuple, list)):
        values = nest
    else:
        values = getattr(nest, "__dict__", {}).values()
    return [pair for value in values for pair in _tensors_with_versions(value)]


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers of a model, such as a transformer's blocks, in order.

    A layer counts as repeated if it has parameters, and its nn.Sequential, ModuleList or ModuleDict
    contains another module of its class. Of nested layers, only the outermost are returned.
    """
    return list(dict.fromkeys(_repeated(model)))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    members = list(module.children())
    classes = Counter(map(type, members))
    for member in members:
        is_container = isinstance(member, _CONTAINERS)
        repeats = isinstance(module, _CONTAINERS) and classes[type(member)] > 1
        if repeats and not is_container and any(True for _ in member.parameters()):
            yield member
        else:
            yield from _repeated(member)


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 shards separately, or the model if it is sharded as a whole."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nothing is sharded
    if fsdp is None:
        return []
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return [module for module in modules if module is not model] or modules


def compile_layers(
    layers: Sequence[nn.Module], compiler: Callable[..., Callable[..., Any]]
) -> None:
    """Makes layers run compiled, in place; layers with the same class and repr share compiled code.

    Names in their state dicts don't change, and module hooks are still called.

    Args:
        compiler: `torch.compile`; takes a function and options.
    """
    groups: dict[tuple[type, str], list[nn.Module]] = {}
    for layer in layers:
        groups.setdefault((type(layer), repr(layer)), []).append(layer)
    for group in groups.values():
        # If forward uses a number that differs by layer, such as its index, torch recompiles for
        # each layer, and the default limit would be too low for a deep model.
        limit = {"recompile_limit": _NUM_VARIANTS * len(group)} if _HAS_LIMIT else {}
        compiled = compiler(_run, **limit)
        for layer in group:
            # `Module.compile` sets this private attribute, too, but would compile every layer
            # separately. A copy of the module loses it (torch 2.13).
            layer._compiled_call_impl = functools.partial(compiled, layer)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Private: `__call__` calls it, too; it runs the module hooks (torch 2.13).
    return layer._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
