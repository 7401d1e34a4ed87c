"""`eventloop checkpoints diff A B`: the differences between two checkpoints."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.checkpoint.checkpoint_files import read_checkpoint, verify_part
from eventloop.checkpoint.part_differences import ValueDifference, differences
from eventloop.cli.arguments import JSON, Arguments, Command, CommandOption
from eventloop.cli.named_checkpoints import one_checkpoint, words
from eventloop.cli.printing import write_json, write_table, write_text
from eventloop.distributed.process_ends import FAILURE
from eventloop.errors import CheckpointError
from eventloop.safe_text import one_line

if TYPE_CHECKING:
    from eventloop.checkpoint.checkpoint_files import Checkpoint
    from eventloop.urls import Place

COMMAND = Command(
    "checkpoints diff",
    "Compares two checkpoints: configuration, task, plugins, other facts, and the whole state of the "
    "training, with the largest absolute difference of each tensor. A and B are folders or URLs of "
    "checkpoints, or of runs, which mean their newest that verifies. Values that differ between any two "
    "runs are left out: seconds, and the state that plugins save as `of_this_run`. Exit status 1 if "
    "there is any other difference.",
    (
        CommandOption("state", "", "compare only the state that training resumes from"),
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
            named_checkpoints = [
                stack.enter_context(one_checkpoint(word)) for word in words(arguments, COMMAND)
            ]
            paths, places = zip(*named_checkpoints, strict=True)
            try:
                comparison = _compared(paths, only_state="state" in arguments.given)
                break
            except CheckpointError:
                if all(map(os.path.lexists, paths)):
                    raise
                # An active run has removed one of the checkpoints meanwhile: find the newest again.
    if "json" in arguments.given:
        write_json(_content(places, comparison))
    else:
        _write(places, comparison)
    return 0 if comparison.is_equal else FAILURE


class _Comparison(NamedTuple):
    """The differences between two checkpoints.

    Attributes:
        sections: the differences by subject.
        source: the lines of a diff of the tasks' files.
        left_out: the kinds of differences that were ignored.
    """

    sections: dict[str, list[ValueDifference]]
    source: list[str]
    left_out: list[str]

    @property
    def is_equal(self) -> bool:
        return not self.source and not any(self.sections.values())


def _compared(paths: Sequence[Path], *, only_state: bool) -> _Comparison:
    first_checkpoint, second_checkpoint = (read_checkpoint(path, only=()) for path in paths)
    sections: dict[str, list[ValueDifference]] = {}
    source: list[str] = []
    if not only_state:
        sections, source = _sections(first_checkpoint.facts, second_checkpoint.facts)
    state_differences = list(_state(first_checkpoint, second_checkpoint))
    sections["state"] = [
        difference for difference in state_differences if not difference.of_one_run
    ]
    left_out = {difference.of_one_run for difference in state_differences if difference.of_one_run}
    return _Comparison(sections, source, sorted(left_out))


def _sections(
    first_facts: Mapping[str, Any], second_facts: Mapping[str, Any]
) -> tuple[dict[str, list[ValueDifference]], list[str]]:
    """Compares the descriptions of two checkpoints.

    Returns:
        The differences by subject, and the lines of a diff of the tasks' files.
    """
    first_facts = _arranged(first_facts)
    second_facts = _arranged(second_facts)
    source = _source_difference(_task(first_facts), _task(second_facts))
    if source:  # the diff replaces the difference of two texts and digests
        for task in (_task(first_facts), _task(second_facts)):
            del task["source"]
            task.pop("digest", None)
    return {
        name: list(differences(first_facts[name], second_facts[name])) for name in first_facts
    }, source


def _arranged(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns facts by subject.

    Plugins are arranged by name, so that an additional plugin doesn't shift the others.
    """
    other_facts = dict(facts)
    manifest = {}
    if isinstance(other_facts.get("manifest"), dict):
        manifest = dict(other_facts.pop("manifest"))
    configuration = {name: manifest.pop(name) for name in _CONFIGURATION if name in manifest}
    if isinstance(configuration.get("task"), dict):
        configuration["task"] = dict(configuration["task"])
    command_line = manifest.get("command_line")
    if isinstance(command_line, list) and all(isinstance(word, str) for word in command_line):
        manifest["command_line"] = shlex.join(command_line)
    names = [name for name in ("plugins", "off", "absent", "order") if name in manifest]
    plugins = {name: _by_name(manifest.pop(name)) for name in names}
    other_facts |= manifest
    return {"configuration": configuration, "plugins": plugins, "facts": other_facts}


def _by_name(plugins: Any) -> Any:
    if not isinstance(plugins, list):
        return plugins
    by_name = {}
    for plugin in plugins:
        if isinstance(plugin, dict) and isinstance(plugin.get("name"), str):
            by_name[plugin["name"]] = plugin
    return by_name if len(by_name) == len(plugins) else plugins


def _task(arranged: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    task = arranged["configuration"].get("task")
    return task if isinstance(task, dict) else {}


def _source_difference(first_task: Mapping[str, Any], second_task: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a diff of two tasks' files; none if either file is unknown."""
    first_text = first_task.get("source")
    second_text = second_task.get("source")
    if not isinstance(first_text, str) or not isinstance(second_text, str):
        return []
    first_lines = first_text.splitlines()
    second_lines = second_text.splitlines()
    if not first_lines or not second_lines:
        return []
    return list(difflib.unified_diff(first_lines, second_lines, "A", "B", n=1, lineterm=""))


def _state(
    first_checkpoint: Checkpoint, second_checkpoint: Checkpoint
) -> Iterator[ValueDifference]:
    """Compares the parts, loading one tensor of each checkpoint at a time."""
    for name in sorted({*first_checkpoint.names, *second_checkpoint.names}):
        if name in first_checkpoint.names and name in second_checkpoint.names:
            yield from differences(
                _part(first_checkpoint, name), _part(second_checkpoint, name), times=True
            )
        elif name in first_checkpoint.names:
            yield ValueDifference(name, "there", "not there")
        else:
            yield ValueDifference(name, "not there", "there")


def _part(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Verifies a part and returns it without loading its tensors."""
    verify_part(checkpoint.path, name)
    return read_checkpoint(checkpoint.path, only=[name], leaving=[name]).parts


def _content(places: Sequence[Place], comparison: _Comparison) -> dict[str, Any]:
    first_place, second_place = places
    content: dict[str, Any] = {
        "a": str(first_place),
        "b": str(second_place),
        "equal": comparison.is_equal,
        "left_out": comparison.left_out,
        "task": comparison.source,
    }
    for name, section in comparison.sections.items():
        content[name] = [
            {
                "path": difference.path,
                "a": difference.first,
                "b": difference.second,
                "largest": difference.largest,
            }
            for difference in section
        ]
    return content


def _write(places: Sequence[Place], comparison: _Comparison) -> None:
    for name, path in zip("AB", places, strict=True):
        write_text(one_line(f"{name}  {path}"))
    for name, section in comparison.sections.items():
        if section:
            write_text(f"\n{name}:")
            write_table(_COLUMNS, [_cells(difference) for difference in section])
        if name == "configuration" and comparison.source:
            write_text("\ntask:")
            for line in comparison.source:
                write_text(one_line(line.expandtabs()))
    if comparison.is_equal:
        write_text("no difference")
    if comparison.left_out:
        left_out = ", ".join(comparison.left_out)
        write_text(one_line(f"left out, because it differs between any two runs: {left_out}"))


def _cells(difference: ValueDifference) -> list[str]:
    largest = "" if difference.largest is None else f"{difference.largest:.4g}"
    cells = (difference.path, difference.first, difference.second, largest)
    return [one_line(cell) for cell in cells]
