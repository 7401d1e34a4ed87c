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
# Events that reach every plugin, even if another one raises.
TELL_ALL = ("exception", "close")
# Collections of the core, each of whose results is a text that stays with its plugin.
OF_ITSELF = ("unsuitable", "header_note")
Function = TypeVar("Function", bound=Callable[..., Any])
Per = Literal["run", "fit", "epoch", "batch", "microbatch", "eval", "eval batch", "predict", "any"]
HookKind = Literal["event", "question", "action", "collection"]
# Hooks that are gone, with what became of them: {"batch_done": "renamed to batch_end in 0.3"}.
REMOVED_HOOKS: Mapping[str, str] = {}

_mark_spec = pluggy.HookspecMarker(PROJECT)
_mark_impl = pluggy.HookimplMarker(PROJECT)
_SPEC = "eventloop_hook"
_IMPL = "eventloop_impl_options"


@dataclass(frozen=True)
class Hook:
    """What the declaration of one hook says.

    Args:
        kind: event, action, question or collection.
        per: how often it fires.
        closes: the event that this one ends, if it ends one.
        argnames: what is passed, in order; `state` first.
        doc: the contract.
        for_algorithms: whether callbacks can't implement it; true of every action.
        spec: the function that declares it.
        declared_by: the names of the plugins that declare it; none for the core's.
        since: the version of what declares it in which it came; "" for the first.
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
        """What a call takes, `state` first."""
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
    """Declares a hook, its docstring being the contract.

    A name that starts with `should_` is a question; `firstresult` makes an action, `collection` a
    collection; anything else is an event, and an implementation that returns something is an
    error.

    Args:
        per: how often the hook fires.
        closes: the name of the event that this one ends; algorithms run it in reverse order.
        firstresult: one implementation owns the hook, and its result is the hook's.
        collection: a call returns a list of all results that aren't None, in order.
        for_algorithms: callbacks can't implement it; true of every action.
        since: the version of the core, or of the package that declares it, in which it came; what
            was there in the first needs none.
        warn_on_impl: the warning that each implementation causes, of a hook that is going.
        warn_on_impl_args: by argument, the warning that each implementation that takes it causes.

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
    """The options of `hookimpl` that pluggy doesn't know."""

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
    """Marks a function or method as the implementation of the hook of its name.

    Args:
        tryfirst: runs before the plugins of its role that don't ask for a place.
        trylast: runs after them.
        wrapper: a generator that encloses all plain implementations: it yields once, receives
            the result or the exception there, and returns the result.
        optionalhook: no error where no hook has this name.
        specname: the hook's name, where the function's own differs.
        before, after: runs before or after these plugins, by name; stronger than the phase.
        every: of an event: runs only on the first call after each multiple of this time has been
            crossed: "50ba", "1ep", "1e6tok".
        conditional: of an action: may return None to pass to the next implementation.
        rank_zero: of a callback's event: runs on global rank 0 alone.

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
    """Returns the names marked with pluggy's own marker, which doesn't say how often a hook fires."""
    return [
        name
        for name, function in _members(namespace).items()
        if hasattr(function, f"{PROJECT}_spec") and not hasattr(function, _SPEC)
    ]


def warnings_of(hook: Hook, argnames: Iterable[str] | None = None) -> list[Warning]:
    """Returns the warnings that an implementation of a hook causes.

    Args:
        argnames: what it takes; anything unless given.
    """
    options = getattr(hook.spec, f"{PROJECT}_spec", {})
    of_all = options.get("warn_on_impl")
    of_args = options.get("warn_on_impl_args") or {}
    names = of_args if argnames is None else argnames
    return [*([of_all] if of_all else []), *(of_args[name] for name in names if name in of_args)]


def _members(namespace: object) -> dict[str, Any]:
    """Returns what a class, its bases included, or a module has."""
    own = namespace.__mro__ if inspect.isclass(namespace) else (namespace, *type(namespace).__mro__)
    return {
        name: one.__func__ if isinstance(one, staticmethod | classmethod) else one
        for each in reversed(own)
        for name, one in getattr(each, "__dict__", {}).items()
    }


def _describe(name: str, function: Callable[..., Any], declared_by: tuple[str, ...]) -> Hook:
    kind, per, closes, for_algorithms, since = getattr(function, _SPEC)
    argnames = tuple(_without_self(function).parameters)
    doc = inspect.getdoc(function) or ""
    return Hook(
        name, kind, per, closes, argnames, doc, for_algorithms, function, declared_by, since
    )


def _without_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return signature.replace(parameters=parameters)


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
    ways: dict[str, list[Edge]] = {start: []}
    queue = [start]
    for name in queue:
        for edge in (one for one in edges if one.first == name):
            if edge.then == goal:
                return [*ways[name], edge]
            if edge.then not in ways:
                ways[edge.then] = [*ways[name], edge]
                queue.append(edge.then)
    return None
