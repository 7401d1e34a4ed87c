"""`eventloop checkpoints ...`: which of its subcommands runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from eventloop.cli.output import write_text
from eventloop.errors import UsageError, closest

# Modules are imported when their subcommand runs: only `diff` needs torch, none a task.
SUBCOMMANDS = {
    "list": "a run's checkpoints: when saved, how large, whether they verify, metrics, plugins",
    "verify": "which files aren't what was written; exit status 4 if any isn't",
    "diff": "what differs between two: configuration, plugins, tensors; exit status 1 if anything",
}


def run(argv: Sequence[str]) -> int:
    """Runs the subcommand that is named first, else `list`."""
    name, rest = "list", list(argv)
    if rest in (["-h"], ["--help"]):
        write_text(_help())
        return 0
    if rest and rest[0] in SUBCOMMANDS:
        name, *rest = rest
    elif rest and not Path(rest[0]).exists() and (near := closest(rest[0], SUBCOMMANDS)):
        raise UsageError(
            f"`eventloop checkpoints` has no subcommand {rest[0]!r}{near}, and there is no such run",
            fix=f"one of {', '.join(SUBCOMMANDS)}, or the folder of a run",
        )
    status: int = importlib.import_module(f"eventloop.cli.checkpoints.{name}").run(rest)
    return status


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in SUBCOMMANDS.items())
    return (
        "usage: eventloop checkpoints RUN\n"
        "       eventloop checkpoints SUBCOMMAND ...\n\n"
        "Lists the checkpoints of a run, verifies them, and compares two.\n\n"
        f"subcommands:\n{listed}\n\n"
        "RUN is a run's folder or URL, or the `checkpoints` in it. Where one checkpoint is wanted, a run "
        "stands\nfor its newest that verifies. `eventloop checkpoints SUBCOMMAND --help` tells more."
    )
