"""`eventloop plugins`: its subcommands and their help."""

from __future__ import annotations

from eventloop.cli.subcommands import CommandGroup

GROUP = CommandGroup(
    "plugins",
    "usage: eventloop plugins [SUBCOMMAND] ...\n\n"
    "Shows which plugins are installed, which take part, and in which order.",
    {
        "list": "what is installed, and whether it takes part",
        "show": "one plugin: options, hooks, edges, import time",
        "order": "in which order plugins are called, and why",
        "hooks": "the hooks that there are, with their contracts",
        "check": "everything that could go wrong; exit status 1 if anything would",
        "enable": "enable an installed plugin, in pyproject.toml",
        "disable": "disable an installed plugin, in pyproject.toml",
        "lock": "write eventloop.lock, from which `fit` then allows no difference",
        "new": "start a plugin: a package with a test that passes",
    },
    "Without SUBCOMMAND it is `list`. See also `eventloop plugins SUBCOMMAND --help`; `--json` makes a\n"
    "table JSON; `-p` and `--no-plugins` choose as for `fit`.",
)
