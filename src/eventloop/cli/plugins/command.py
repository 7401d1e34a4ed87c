"""`eventloop plugins ...`: which of its subcommands runs, and what they share."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from eventloop.cli.output import write_text
from eventloop.errors import UsageError, closest

# Modules are imported when their subcommand runs: `list` and `hooks` need neither torch nor plugins.
SUBCOMMANDS = {
    "list": "what is installed, and whether it takes part",
    "show": "one plugin: options, hooks, edges, import time",
    "order": "who is called when, and why in this order",
    "hooks": "the hooks that there are, with their contracts",
    "check": "everything that could go wrong; exit status 1 if anything would",
    "lock": "write eventloop.lock, from which `fit` then allows no difference",
    "new": "start a plugin: a package with a test that passes",
}


def run(argv: Sequence[str]) -> int:
    """Runs the subcommand that is named first, else `list`."""
    name, rest = "list", list(argv)
    if rest and not rest[0].startswith("-"):
        name, *rest = rest
    if name not in SUBCOMMANDS:
        raise UsageError(
            f"`eventloop plugins` has no subcommand {name!r}{closest(name, SUBCOMMANDS)}",
            fix=f"one of {', '.join(SUBCOMMANDS)}",
        )
    if name == "list" and rest in (["-h"], ["--help"]):
        write_text(_help())
        return 0
    status: int = importlib.import_module(f"eventloop.cli.plugins.{name}").run(rest)
    return status


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in SUBCOMMANDS.items())
    return (
        "usage: eventloop plugins [SUBCOMMAND] ...\n\n"
        "Shows what is installed, what takes part, and in which order.\n\n"
        f"subcommands:\n{listed}\n\n"
        "`eventloop plugins SUBCOMMAND --help` tells more; `--json` makes a table JSON; "
        "`-p` and `--no-plugins` choose as for `fit`."
    )
