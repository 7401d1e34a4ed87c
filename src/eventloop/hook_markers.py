"""The markers `hookspec` and `hookimpl`; the hooks are declared in `events.py` and `actions.py`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

import pluggy

from eventloop.clock import Time

PROJECT = "eventloop"
# Events that are called on every plugin, even if one raises.
TELL_ALL = ("exception", "close")
# Collections in which a plugin describes itself: a result is a text, and is kept with the plugin.
OF_ITSELF = ("unsuitable", "header_note")
Function = TypeVar("Function", bound=Callable[..., Any])
Per = Literal["run", "fit", "epoch", "batch", "microbatch", "eval", "eval batch", "predict", "any"]
HookKind = Literal["event", "question", "action", "collection"]
# Removed hooks with their replacement: {"batch_done": "renamed to batch_end in 0.3"}.
REMOVED_HOOKS: Mapping[str, str] = {}

_mark_spec = pluggy.HookspecMarker(PROJECT)
_mark_impl = pluggy.HookimplMarker(PROJECT)
_SPEC = "eventloop_hook"
_IMPL = "eventloop_impl_options"


@dataclass(frozen=True)
class Hook:
    """The declaration of a hook.

    Args:
        kind: event, action, question or collection.
        per: how often the hook is called.
        closes: the event that this event ends; None if it ends none.
        argnames: the arguments in order; `state` is the first.
        doc: the contract.
        for_algorithms: whether only algorithms may implement the hook, as is true of every action.
        spec: the function that declares the hook.
        declared_by: the names of the plugins that declare the hook; empty for hooks of the core.
        since: the version of the core or the package that introduced the hook; "" for the first.
    """

    name: str
    kind: HookKind
    per: Per
    closes: str | None
    argnames: tuple[str, ...]
    doc: str
    for_algorithms: bool = False
    spec: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    declared_by: tuple[str, ...] = ()
    since: str = ""

    @property
    def signature(self) -> inspect.Signature:
        """The arguments of a call; `state` is the first."""
        assert self.spec is not None
        return _without_self(self.spec)


def hookspec(
    *,
    per: Per,
    closes: str | None = None,
    firstresult: bool = False,
    collection: bool = False,
    for_algorithms: bool = False,
    since: str = "",
    warn_on_impl: Warning | None = None,
    warn_on_impl_args: Mapping[str, Warning] | None = None,
) -> Callable[[Function], Function]:
    """Declares a hook. The docstring of the function is the contract of the hook.

    A hook whose name begins with `should_` is a question, with `firstresult` an action, with
    `collection` a collection. All others are events, whose implementations must return None.

    Args:
        per: how often the hook is called.
        closes: the name of the event that this event ends. Algorithms run it in reverse order.
        firstresult: the hook is an action: one implementation owns it and returns its result.
        collection: a call returns a list of all results that aren't None, in order.
        for_algorithms: only algorithms may implement the hook; implied by `firstresult`.
        since: the version of the core, or of the declaring package, that introduced the hook; not
            needed in the first version.
        warn_on_impl: a warning for every implementation, for a hook that will be removed.
        warn_on_impl_args: by argument, a warning for every implementation that has this argument.

    Raises:
        ValueError: the options make the hook two kinds at once.
    """

    def mark(function: Function) -> Function:
        is_question = function.__name__.startswith("should_")
        if firstresult + collection + is_question > 1:
            raise ValueError(
                f"{function.__name__} can't be two kinds of hook: `should_...` is a question, "
                "firstresult=True an action, collection=True a collection"
            )
        kind: HookKind = "event"
        if is_question:
            kind = "question"
        elif firstresult:
            kind = "action"
        elif collection:
            kind = "collection"
        setattr(function, _SPEC, (kind, per, closes, for_algorithms or firstresult, since))
        return _mark_spec(
            function,
            firstresult=firstresult,
            warn_on_impl=warn_on_impl,
            warn_on_impl_args=warn_on_impl_args,
        )

    return mark


@dataclass(frozen=True)
class ImplOptions:
    """The options of `hookimpl` that pluggy doesn't have."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    every: Time | None = None
    conditional: bool = False
    rank_zero: bool = False


@overload
def hookimpl(function: Function, /) -> Function: ...
@overload
def hookimpl(
    *,
    tryfirst: bool = ...,
    trylast: bool = ...,
    wrapper: bool = ...,
    optionalhook: bool = ...,
    specname: str | None = ...,
    before: str | tuple[str, ...] = ...,
    after: str | tuple[str, ...] = ...,
    every: str | Time | None = ...,
    conditional: bool = ...,
    rank_zero: bool = ...,
) -> Callable[[Function], Function]: ...
def hookimpl(
    function: Function | None = None,
    /,
    *,
    tryfirst: bool = False,
    trylast: bool = False,
    wrapper: bool = False,
    optionalhook: bool = False,
    specname: str | None = None,
    before: str | tuple[str, ...] = (),
    after: str | tuple[str, ...] = (),
    every: str | Time | None = None,
    conditional: bool = False,
    rank_zero: bool = False,
) -> Function | Callable[[Function], Function]:
    """Marks a function or method as an implementation of the hook with its name.

    Args:
        tryfirst: run before other plugins of the same role.
        trylast: run after other plugins of the same role.
        wrapper: the function is a generator around all other implementations: it yields once, the
            `yield` returns their result or raises their exception, and it returns the result.
        optionalhook: don't raise an error if there is no hook with this name.
        specname: the name of the hook, if the function has another name.
        before, after: names of plugins to run before or after; overrides `tryfirst` and `trylast`.
        every: for events: run only on the first call after each multiple of this time: "50ba", "1ep",
            "1e6tok".
        conditional: for actions: a result of None passes the call to the next implementation.
        rank_zero: for events of callbacks: run only on global rank 0.

    Raises:
        ValueError: `every` is not a time.
    """
    time = None if every is None else Time(every)
    options = ImplOptions(_names(before), _names(after), time, conditional, rank_zero)
    phased = functools.partial(_mark_impl, tryfirst=tryfirst, trylast=trylast)
    by_pluggy = phased(wrapper=wrapper, optionalhook=optionalhook, specname=specname)

    def mark(function: Function) -> Function:
        setattr(function, _IMPL, options)
        marked: Function = by_pluggy(function)
        return marked

    return mark if function is None else mark(function)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def impl_options(function: Callable[..., Any]) -> ImplOptions:
    """Reads the options of `hookimpl` that pluggy doesn't have."""
    options: ImplOptions = getattr(function, _IMPL, ImplOptions())
    return options


def declared_hooks(namespaces: Iterable[object], *declared_by: str) -> dict[str, Hook]:
    """Reads the hooks that classes or modules declare, in the order of declaration."""
    return {
        name: _describe(name, function, declared_by)
        for namespace in namespaces
        for name, function in _members(namespace).items()
        if hasattr(function, _SPEC)
    }


def marked_by_pluggy(namespace: object) -> list[str]:
    """Returns the functions with pluggy's own marker, which doesn't say how often a hook is called."""
    return [
        name
        for name, function in _members(namespace).items()
        if hasattr(function, f"{PROJECT}_spec") and not hasattr(function, _SPEC)
    ]


def warnings_of(hook: Hook, argnames: Iterable[str] | None = None) -> list[Warning]:
    """Returns the warnings that an implementation of a hook causes.

    Args:
        argnames: the arguments of the implementation; None for all arguments.
    """
    options = getattr(hook.spec, f"{PROJECT}_spec", {})
    warnings_by_argument = options.get("warn_on_impl_args") or {}
    if argnames is None:
        argnames = warnings_by_argument
    warnings = [warnings_by_argument[name] for name in argnames if name in warnings_by_argument]
    if warning := options.get("warn_on_impl"):
        warnings.insert(0, warning)
    return warnings


def _members(namespace: object) -> dict[str, Any]:
    """Returns the members of a module, or of a class and its bases, by name."""
    if inspect.isclass(namespace):
        owners: tuple[object, ...] = namespace.__mro__
    else:
        owners = (namespace, *type(namespace).__mro__)
    members: dict[str, Any] = {}
    for owner in reversed(owners):
        for name, member in getattr(owner, "__dict__", {}).items():
            is_wrapped = isinstance(member, staticmethod | classmethod)
            members[name] = member.__func__ if is_wrapped else member
    return members


def _describe(name: str, function: Callable[..., Any], declared_by: tuple[str, ...]) -> Hook:
    kind, per, closes, for_algorithms, since = getattr(function, _SPEC)
    argnames = tuple(_without_self(function).parameters)
    doc = inspect.getdoc(function) or ""
    return Hook(
        name, kind, per, closes, argnames, doc, for_algorithms, function, declared_by, since
    )


def _without_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    without_self = [parameter for parameter in parameters if parameter.name not in ("self", "cls")]
    return signature.replace(parameters=without_self)


@dataclass(frozen=True)
class Edge:
    """A request that one plugin runs before another.

    Args:
        first, then: folded names.
        declared_by: who requests it, as shown in messages.
        by_user: whether it is in the configuration, which wins over a plugin's.
        typed: both names as a person types them.
    """

    first: str
    then: str
    declared_by: str
    by_user: bool = False
    typed: tuple[str, str] = field(default=("", ""), compare=False)

    def __str__(self) -> str:
        first, then = self.typed
        return f"{first or self.first} before {then or self.then}, declared by {self.declared_by}"

    def named(self, names: Mapping[str, str]) -> Edge:
        """Returns the edge with names as they are typed, where these are known by folded name."""
        first = names.get(self.first, self.first)
        then = names.get(self.then, self.then)
        return dataclasses.replace(self, typed=(first, then))


def path_of(start: str, goal: str, edges: Sequence[Edge]) -> list[Edge] | None:
    """Returns a shortest path of edges from one name to another; None if there is none."""
    paths: dict[str, list[Edge]] = {start: []}
    queue = [start]
    for name in queue:
        for edge in edges:
            if edge.first != name:
                continue
            if edge.then == goal:
                return [*paths[name], edge]
            if edge.then not in paths:
                paths[edge.then] = [*paths[name], edge]
                queue.append(edge.then)
    return None
