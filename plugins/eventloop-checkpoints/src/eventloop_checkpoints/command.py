"""`eventloop checkpoints`: runs the subcommand that is named first, by default `list`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from eventloop.commands import (
    UsageError,
    closest,
    run_command,
    write_text,
)

# Each is a module, imported when it runs: only `diff` needs torch.
SUBCOMMANDS = {
    "list": "a run's checkpoints: when saved, how large, whether they verify, metrics, plugins",
    "verify": "which files aren't what was written; exit status 4 if any isn't",
    "diff": "what differs between two: configuration, plugins, tensors; exit status 1 if anything",
}
_HELP = """\
usage: eventloop checkpoints RUN
       eventloop checkpoints SUBCOMMAND ...

Lists the checkpoints of a run, verifies them, and compares two.

subcommands:
{subcommands}

RUN is a run's folder or URL, or the `checkpoints` in it. Where one checkpoint is needed, a run means
its newest that verifies. See also `eventloop checkpoints SUBCOMMAND --help`."""


def run(argv: Sequence[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: it has no such subcommand, and there is no such run.
    """
    name, rest = "list", list(argv)
    if rest[:1] in (["-h"], ["--help"]):
        width = max(map(len, SUBCOMMANDS))
        listed = (f"  {name:<{width}}  {what}" for name, what in SUBCOMMANDS.items())
        write_text(_HELP.format(subcommands="\n".join(listed)))
        return 0
    if rest and rest[0] in SUBCOMMANDS:
        name, *rest = rest
    elif rest and not rest[0].startswith("-"):
        _require_run(rest[0])
    subject = importlib.import_module(f"eventloop_checkpoints.{name}")
    return run_command(subject.COMMAND, subject.run, rest)


def _require_run(word: str) -> None:
    near = closest(word, SUBCOMMANDS)
    if near and not Path(word).exists():
        raise UsageError(
            f"`eventloop checkpoints` has no subcommand {word!r}{near}, and there is no such run",
            fix=f"one of {', '.join(SUBCOMMANDS)}, or the folder of a run",
        )
