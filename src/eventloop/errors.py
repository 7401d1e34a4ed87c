"""Errors that say what happened, which plugin is concerned, and what to do next."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol, Self, TypeVar

_FRAMES = ("Exception raised from ", "C++ CapturedTraceback", "frame #")

T = TypeVar("T")


class Subject(Protocol):
    """The subject of a problem, such as a plugin."""

    @property
    def name(self) -> str:
        """The name as the user types it."""
        ...


class EventloopError(Exception):
    """The base of every error that eventloop itself raises.

    Args:
        what: one sentence that says what happened, with the values.
        fix: what to do next, with the line to paste.
        subjects: the plugins that the error is about; empty if it is about the whole command.
        facts: further lines of the message in order, such as the plugin and the hook.
    """

    def __init__(
        self, what: str, *, fix: str = "", subjects: Iterable[Subject] = (), **facts: object
    ) -> None:
        lines = {name.rstrip("_"): _text(value) for name, value in facts.items()}
        if fix:
            lines["fix"] = fix
        width = max((len(name) for name in lines), default=0)
        what, frames = _without_frames(what)
        fields = [f"  {name:<{width}}  {text}" for name, text in lines.items()]
        super().__init__("\n".join([what, *fields, *frames]))
        self.what = what
        self.fix = fix
        self.facts = facts
        self.subjects = tuple(subjects)


def _text(value: object) -> str:
    """Returns a fact as text; a path with line breaks as its repr."""
    text = value if isinstance(value, str) else str(value)
    return ascii(text) if isinstance(value, PurePath) and not text.isprintable() else text


def _without_frames(text: str) -> tuple[str, list[str]]:
    """Removes the C++ stack trace that torch adds to its messages."""
    lines = text.split("\n")
    starts = (idx for idx, line in enumerate(lines) if line.lstrip().startswith(_FRAMES))
    start = next(starts, len(lines))
    return "\n".join(lines[:start]) if lines[start:] else text, lines[start:]


def text_of(error: BaseException) -> str:
    """Returns the text of any exception, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - its class may do anything
        return f"(its text can't be read: __str__ raises {type(problem).__name__})"


class UsageError(EventloopError):
    """The command or its configuration requests something that doesn't exist; exit status 2."""


class SettingError(UsageError, ValueError):
    """A setting or option is unknown, has the wrong type, or would have no effect."""


class TaskError(EventloopError):
    """The task lacks something, or returns something that can't be trained."""


class TaskFileError(UsageError, TaskError):
    """A task file can't be found, can't be read, or has no task."""


class NonFiniteError(EventloopError):
    """The loss or a gradient is NaN or infinite."""


class CheckpointError(EventloopError):
    """A checkpoint can't be written, or doesn't verify, or doesn't fit; exit status 4."""


class ResumeError(UsageError):
    """A run can't be resumed: something differs from how it began."""


class RunFolderError(UsageError):
    """A path in the run folder isn't a regular file."""


class PluginError(EventloopError):
    """A plugin can't be used, or broke the contract of a hook."""


class ReadOnlyStateError(PluginError, AttributeError):
    """A callback tried to change something that is read-only for callbacks."""


def closest(name: str, names: Iterable[str], what: str = "the closest") -> str:
    """Returns "; the closest is 'x'" for the closest of `names`, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; {what} is {matches[0]!r}" if matches else ""


def closest_at(path: Path, pattern: str = "*") -> str:
    """Returns "; the closest is 'x'" for the files in the folder of a path that match a pattern."""
    return closest(path.name, sorted(file.name for file in path.parent.glob(pattern)))


def a(noun: str) -> str:
    """Returns a noun with its article: "a Tensor", "an int"; None unchanged."""
    if noun == "NoneType":
        return "None"
    return f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Returns a number with its noun: "1 sample", "2,000 samples"; the default plural adds -s."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def first_of(texts: Iterable[str], most: int = 3, separator: str = ", ") -> str:
    """Returns the first of several texts, and how many more there are."""
    all_texts = list(texts)
    more = f" and {len(all_texts) - most} more" if len(all_texts) > most else ""
    return separator.join(all_texts[:most]) + more


def raise_all(
    problems: Sequence[EventloopError],
    about: str = "plugins",
    kind: type[EventloopError] | None = None,
) -> None:
    """Raises all problems at once: a single one unchanged, several in one numbered message.

    Args:
        kind: the class of the message; by default UsageError if all problems are usage errors, else
            PluginError.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        texts = [f"{number}. {text_of(problem)}" for number, problem in enumerate(problems, 1)]
        if kind is None:
            is_usage = all(isinstance(problem, UsageError) for problem in problems)
            kind = UsageError if is_usage else PluginError
        raise kind("\n".join([f"{len(problems)} problems with {about}", *texts]))


class Note(str):
    """A note on an exception, with a kind for code and a text for the user.

    Attributes:
        kind: "origin" names the plugin that raised, "given" the arguments of the call, "samples" the
            samples that a data set was reading, "memory" how to use less memory, "later" an exception
            that was raised afterwards, "plugins" the active plugins.
    """

    kind: str

    def __new__(cls, text: str, kind: str = "") -> Self:  # noqa: D102 - unpickling gives the text alone
        note = super().__new__(cls, text)
        note.kind = kind
        return note


def notes_of(error: BaseException, kind: str) -> list[Note]:
    """Returns the notes of a kind on an exception."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if isinstance(note, Note) and note.kind == kind]


def note_later(error: BaseException, other: BaseException) -> None:
    """Adds a note to an exception: another exception that was raised while it was handled."""
    details = "".join(traceback.format_exception(other, chain=False))
    text = f"then also: {type(other).__name__}: {text_of(other)}\n{details.rstrip()}"
    error.add_note(Note(text, "later"))


def as_first(share: Callable[[Any], Any], act: Callable[[], T]) -> T:
    """Calls a function on every rank; all ranks return the result of rank 0, or raise its error."""
    try:
        local_result: T | EventloopError = act()
    except EventloopError as error:
        local_result = error
    result: T | EventloopError = share(local_result)
    if isinstance(result, EventloopError):
        raise result
    return result


def failures_of(function: Callable[[], None]) -> list[BaseException]:
    """Calls a function; returns a list with the exception that it raised, or an empty list."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001  the caller raises what came first
        return [error]
    return []
