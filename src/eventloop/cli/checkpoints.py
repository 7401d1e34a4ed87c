"""`eventloop checkpoints`: its subcommands and their help."""

from __future__ import annotations

from eventloop.cli.subcommands import CommandGroup

GROUP = CommandGroup(
    "checkpoints",
    "usage: eventloop checkpoints RUN\n"
    "       eventloop checkpoints SUBCOMMAND ...\n\n"
    "Lists the checkpoints of a run, verifies them, and compares two.",
    {
        "list": "a run's checkpoints: when saved, how large, whether they verify, metrics, plugins",
        "verify": "the files that have changed since they were written; exit status 4 if there are any",
        "diff": "differences of two: configuration, plugins, tensors; exit status 1 if there are any",
    },
    "RUN is a run's folder or URL, or the `checkpoints` in it. Where a single checkpoint is needed, a run\n"
    "means its newest that verifies. See also `eventloop checkpoints SUBCOMMAND --help`.",
    list_argument="RUN",
)
