"""`eventloop plugins`: its subcommands and their help."""

from __future__ import annotations

from eventloop.cli.subcommands import CommandGroup

GROUP = CommandGroup(
    "plugins",
    "usage: eventloop plugins [SUBCOMMAND] ...\n\n"
    "Shows which plugins are installed, which take part, and in which order.",
    {
        "list": "the installed plugins, and whether they take part",
        "show": "a plugin's options, hooks, edges and import time",
        "order": "the order in which plugins are called, with reasons",
        "hooks": "all hooks, with their contracts",
        "check": "everything that would stop a run; exit status 1 if there is any",
        "enable": "enable an installed plugin, in pyproject.toml",
        "disable": "disable an installed plugin, in pyproject.toml",
        "lock": "write eventloop.lock; `fit` then refuses any difference from it",
        "new": "start a plugin: a package with a test that passes",
    },
    "The default SUBCOMMAND is `list`. See also `eventloop plugins SUBCOMMAND --help`. `--json` prints JSON\n"
    "instead of a table; `-p` and `--no-plugins` choose plugins as for `fit`.",
)
