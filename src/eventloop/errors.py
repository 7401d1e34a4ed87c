"""Errors that say what happened, who did it, and what to do next."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, Literal, Protocol, Self, TypeVar

_FRAMES = ("Exception raised from ", "C++ CapturedTraceback", "frame #")

T = TypeVar("T")


class Subject(Protocol):
    """What a problem is about: a plugin, say."""

    @property
    def name(self) -> str:
        """What a person types."""
        ...


class EventloopError(Exception):
    """The base of every error that eventloop itself raises.

    Args:
        what: what happened, with the values seen; one sentence.
        fix: what to do next, with the line to paste.
        subjects: the plugins that it is about; none where it is about the command as a whole.
        facts: who did it and where, a line each, in the order given.
    """

    def __init__(
        self, what: str, *, fix: str = "", subjects: Iterable[Subject] = (), **facts: object
    ) -> None:
        lines = {name.rstrip("_"): _text(value) for name, value in facts.items()}
        if fix:
            lines["fix"] = fix
        width = max((len(name) for name in lines), default=0)
        what, frames = _without_frames(what)
        listed = (f"  {name:<{width}}  {text}" for name, text in lines.items())
        super().__init__("\n".join([what, *listed, *frames]))
        self.what = what
        self.fix = fix
        self.subjects = tuple(subjects)


def _text(value: object) -> str:
    """Returns a fact as text; a path with ends of lines in it as Python writes it."""
    text = str(value)
    return ascii(text) if isinstance(value, PurePath) and not text.isprintable() else text


def _without_frames(text: str) -> tuple[str, list[str]]:
    """Splits off what C++ says of its stack, which torch puts into the text of its errors."""
    lines = text.split("\n")
    starts = (idx for idx, line in enumerate(lines) if line.lstrip().startswith(_FRAMES))
    start = next(starts, len(lines))
    return "\n".join(lines[:start]), lines[start:]


def text_of(error: BaseException) -> str:
    """Returns the text of an exception of anyone's, or what is wrong with that."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - its class may do anything
        return f"(its text can't be read: __str__ raises {type(problem).__name__})"


class UsageError(EventloopError):
    """The command or its configuration asks for something that isn't there; exit status 2."""


class SettingError(UsageError, ValueError):
    """A setting or option is unknown, has the wrong type, or would have no effect."""


class TaskError(EventloopError):
    """The task lacks something, or gives something that can't be trained."""


class TaskFileError(UsageError, TaskError):
    """A task file can't be found, can't be read, or holds no task."""


class NonFiniteError(EventloopError):
    """The loss or the gradients aren't numbers any more, so that nothing can be learned."""


class CheckpointError(EventloopError):
    """A checkpoint can't be written, or doesn't verify, or doesn't fit; exit status 4."""


class ResumeError(UsageError):
    """A run can't go on as it is started: something differs from how it was begun."""


class RunFolderError(UsageError):
    """Something else than a file is where a run opens one: a link, a pipe, a device, say."""


class PluginError(EventloopError):
    """A plugin can't take part, or broke the contract of a hook."""


class ReadOnlyStateError(PluginError, AttributeError):
    """A callback tried to change what it may only watch."""


def closest(name: str, names: Iterable[str]) -> str:
    """Returns "; the closest is 'x'" for the nearest of `names`, or "" where none is near."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; the closest is {found[0]!r}" if found else ""


def a(noun: str) -> str:
    """Returns a noun with its article: "a Tensor", "an int"; None as it is."""
    if noun == "NoneType":
        return "None"
    return f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Returns a number with its noun: "1 sample", "2,000 samples"; a plural in -s needn't be given."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def raise_all(problems: Sequence[EventloopError]) -> None:
    """Raises all problems at once: the only one as it is, several in one numbered message.

    Raises:
        UsageError: `problems` is about the command and its configuration alone.
        PluginError: it is about plugins, too.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "\n".join(f"{idx}. {problem}" for idx, problem in enumerate(problems, 1))
        is_usage = all(isinstance(one, UsageError) for one in problems)
        kind = UsageError if is_usage else PluginError
        raise kind(f"{len(problems)} problems with plugins\n{listed}")


class Note(str):
    """A note on an exception that code asks for by its kind; the words are for people.

    Attributes:
        kind: "origin" says what raised it, "given" what that was given, "later" what was raised after it,
            "plugins" which took part.
    """

    kind: str

    def __new__(cls, text: str, kind: Literal["origin", "given", "later", "plugins"]) -> Self:
        """Makes a note."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Returns what pickle makes it of again, on another rank say."""
        return str(self), self.kind


def notes_of(error: BaseException, kind: str) -> list[Note]:
    """Returns the notes of a kind on an exception."""
    notes = getattr(error, "__notes__", ())
    return [one for one in notes if isinstance(one, Note) and one.kind == kind]


def keep(error: BaseException, other: BaseException) -> None:
    """Notes on an exception that another was raised while it was dealt with, and where."""
    details = "".join(traceback.format_exception(other, chain=False))
    text = f"then also: {type(other).__name__}: {text_of(other)}\n{details}".rstrip()
    error.add_note(Note(text, "later"))


def as_first(share: Callable[[Any], Any], act: Callable[[], T]) -> T:
    """Calls a function; returns, or raises, what it did on rank 0, of which all ranks get a value."""
    try:
        mine: T | EventloopError = act()
    except EventloopError as error:
        mine = error
    first: T | EventloopError = share(mine)
    if isinstance(first, EventloopError):
        raise first
    return first


def failures_of(function: Callable[[], None]) -> list[BaseException]:
    """Calls a function; gives what it raised, if it did."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001  the caller raises what came first
        return [error]
    return []
