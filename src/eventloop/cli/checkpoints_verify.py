"""`eventloop checkpoints verify PATH`: checks that all files are undamaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from eventloop.checkpoint.locations import require_checkpoints
from eventloop.checkpoint.store import look_at
from eventloop.checkpoint.verifying import damages
from eventloop.cli.arguments import JSON, Arguments, Command
from eventloop.cli.named_checkpoints import uploaded_at, words
from eventloop.cli.printing import write_json, write_text
from eventloop.distributed.process_ends import NO_CHECKPOINT
from eventloop.errors import counted
from eventloop.safe_text import one_line
from eventloop.urls import Place, place_of

COMMAND = Command(
    "checkpoints verify",
    "Reads all files of a checkpoint, or of all checkpoints of a run, and names each file that has "
    "changed since it was written. PATH is the folder or URL of a checkpoint or of a run. Exit status 4 "
    "if any checkpoint is damaged.",
    (JSON,),
    argument="PATH",
    takes_plugins=False,
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    (word,) = words(arguments, COMMAND)
    as_json = "json" in arguments.given
    rows = []
    for path, problems, passed_over in _problems(word):
        row = {"checkpoint": str(path), "verified": not problems}
        rows.append({**row, "problems": problems, "passed_over": passed_over})
        if not as_json:
            verdict = "doesn't verify" if problems else "verified"
            passed_over_note = (
                f", but no run resumes from it by default: {passed_over}" if passed_over else ""
            )
            write_text(one_line(f"{path}: {verdict}{passed_over_note}"))
            for problem in problems:
                write_text(f"  {one_line(problem)}")
    if as_json:
        write_json(rows)
    num_damaged = sum(not row["verified"] for row in rows)
    if len(rows) > 1 and not as_json:
        write_text(f"{len(rows) - num_damaged} of {counted(len(rows), 'checkpoint')} verified")
    return NO_CHECKPOINT if num_damaged else 0


def _problems(word: str) -> Iterator[tuple[Place, list[str], str]]:
    """Yields each checkpoint, with its damage and the reason why a resume would skip it."""
    place = place_of(word)
    if isinstance(place, Path):
        has_yielded = False
        while not has_yielded:  # an active run may have removed all listed checkpoints
            for path in require_checkpoints(place):
                problems = ["it is a link, or not a folder"]
                if path.is_dir() and not path.is_symlink():
                    problems = [str(damage) for damage in damages(path)]
                passed_over = "" if problems else look_at(path, digests=False).reason
                if os.path.lexists(path):
                    has_yielded = True
                    yield path, problems, passed_over
        return
    for checkpoint in uploaded_at(place, digests=True):
        if checkpoint.damage:
            yield checkpoint.path, [checkpoint.damage], ""
        else:
            yield checkpoint.path, [], checkpoint.reason
