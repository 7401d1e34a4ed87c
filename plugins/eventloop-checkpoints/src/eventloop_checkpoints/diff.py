"""`eventloop checkpoints diff A B`: the differences between two checkpoints."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop import CheckpointError
from eventloop.commands import (
    FAILURE,
    Arguments,
    Command,
    CommandOption,
    one_checkpoint,
    one_line,
    read_checkpoint,
    verify_part,
    words,
    write_json,
    write_table,
    write_text,
)
from eventloop_checkpoints.described import JSON
from eventloop_checkpoints.differences import Difference, differences

if TYPE_CHECKING:
    from eventloop.commands import Checkpoint, Place

COMMAND = Command(
    "checkpoints diff",
    "Compares two checkpoints: configuration, task, plugins, what else is known of them, and all "
    "that training goes on from, tensors by name with the largest absolute difference. A and B are "
    "folders or URLs of checkpoints, or of runs, which stand for their newest that verifies. What no two "
    "runs share is left out: seconds, and what plugins keep as `of_this_run`. Exit status 1 if anything "
    "else differs.",
    (
        CommandOption("state", "", "compare only what training resumes from"),
        JSON,
    ),
    argument="A B",
    takes_plugins=False,
)
_CONFIGURATION = ("settings", "task", "optimizers", "owners", "device")
_COLUMNS = ("what", "A", "B", "largest difference")


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    while True:
        with ExitStack() as stack:
            both = [stack.enter_context(one_checkpoint(word)) for word in words(arguments, COMMAND)]
            paths, places = zip(*both, strict=True)
            try:
                found = _compared(paths, only_state="state" in arguments.given)
                break
            except CheckpointError:
                if all(map(os.path.lexists, paths)):
                    raise  # otherwise a run under way has removed one, and has others
    if "json" in arguments.given:
        write_json(_content(places, found))
    else:
        _write(places, found)
    return 0 if found.is_equal else FAILURE


class _Compared(NamedTuple):
    """The differences: by subject, in the task's file, and ignored ones."""

    sections: dict[str, list[Difference]]
    source: list[str]
    left_out: list[str]

    @property
    def is_equal(self) -> bool:
        return not self.source and not any(self.sections.values())


def _compared(paths: Sequence[Path], *, only_state: bool) -> _Compared:
    first, second = (read_checkpoint(path, only=()) for path in paths)
    sections, source = ({}, []) if only_state else _sections(first.facts, second.facts)
    found = list(_state(first, second))
    sections["state"] = [one for one in found if not one.of_one_run]
    left_out = sorted({one.of_one_run for one in found if one.of_one_run})
    return _Compared(sections, source, left_out)


def _sections(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[dict[str, list[Difference]], list[str]]:
    """Compares the descriptions of two checkpoints; the task's file as the lines of a diff."""
    one, other = _arranged(first), _arranged(second)
    source = _source_difference(one, other)
    if source:  # which says more
        for task in (_task(one), _task(other)):
            del task["source"]
            task.pop("digest", None)
    return {name: list(differences(one[name], other[name])) for name in one}, source


def _arranged(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns facts by subject; plugins by name, so that an added one doesn't shift the others."""
    rest = dict(facts)
    manifest = rest.pop("manifest", {})
    if not isinstance(manifest, dict):
        manifest, rest["manifest"] = {}, manifest
    known = dict(manifest)
    configuration = {name: known.pop(name) for name in _CONFIGURATION if name in known}
    if isinstance(configuration.get("task"), dict):
        configuration["task"] = dict(configuration["task"])
    line = known.get("command_line")
    if isinstance(line, list) and all(isinstance(word, str) for word in line):
        known["command_line"] = shlex.join(line)
    names = [name for name in ("plugins", "off", "absent", "order") if name in known]
    plugins = {name: _by_name(known.pop(name)) for name in names}
    return {"configuration": configuration, "plugins": plugins, "facts": {**rest, **known}}


def _by_name(plugins: Any) -> Any:
    if not isinstance(plugins, list):
        return plugins
    rows = [one for one in plugins if isinstance(one, dict) and isinstance(one.get("name"), str)]
    named = {one["name"]: one for one in rows}
    return named if len(named) == len(plugins) else plugins


def _task(arranged: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    task = arranged["configuration"].get("task")
    return task if isinstance(task, dict) else {}


def _source_difference(
    one: Mapping[str, dict[str, Any]], other: Mapping[str, dict[str, Any]]
) -> list[str]:
    texts = [_task(each).get("source") for each in (one, other)]
    before, after = (text.splitlines() if isinstance(text, str) else [] for text in texts)
    if not before or not after:
        return []
    return list(difflib.unified_diff(before, after, "A", "B", n=1, lineterm=""))


def _state(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Compares the parts; loads one tensor at a time of each checkpoint."""
    for name in sorted({*first.names, *second.names}):
        there = [name in one.names for one in (first, second)]
        if all(there):
            one, other = (_left(each, name) for each in (first, second))
            yield from differences(one, other, times=True)
        else:
            a, b = ("there" if one else "not there" for one in there)
            yield Difference(name, a, b)


def _left(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Verifies a part and returns it without loading its tensors."""
    verify_part(checkpoint.path, name)
    return read_checkpoint(checkpoint.path, only=[name], leaving=[name]).parts


def _content(places: Sequence[Place], found: _Compared) -> dict[str, Any]:
    rows = {
        name: [
            {"path": one.path, "a": one.first, "b": one.second, "largest": one.largest}
            for one in section
        ]
        for name, section in found.sections.items()
    }
    a, b = map(str, places)
    facts = {"equal": found.is_equal, "left_out": found.left_out, "task": found.source}
    return {"a": a, "b": b, **facts, **rows}


def _write(places: Sequence[Place], found: _Compared) -> None:
    for name, path in zip("AB", places, strict=True):
        write_text(one_line(f"{name}  {path}"))
    for name, section in found.sections.items():
        if section:
            write_text(f"\n{name}:")
            write_table(_COLUMNS, [_cells(one) for one in section])
        if name == "configuration" and found.source:
            write_text("\ntask:")
            for line in found.source:
                write_text(one_line(line.expandtabs()))
    if found.is_equal:
        write_text("no difference")
    if found.left_out:
        write_text(one_line(f"left out, since no two runs share it: {', '.join(found.left_out)}"))


def _cells(one: Difference) -> list[str]:
    largest = "" if one.largest is None else f"{one.largest:.4g}"
    return [one_line(cell) for cell in (one.path, one.first, one.second, largest)]
