"""Commands with subcommands: each subcommand has its own module, and `list` is the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eventloop.errors import UsageError, closest


@dataclass(frozen=True)
class CommandGroup:
    """A command with subcommands.

    Args:
        name: `plugins`, whose subcommand `show` is the module `plugins_show`.
        usage: the first lines of the help.
        subcommands: the descriptions of the subcommands by name.
        notes: the last lines of the help.
        list_argument: the argument of `list`, which may be used without the word `list`.
    """

    name: str
    usage: str
    subcommands: Mapping[str, str]
    notes: str
    list_argument: str = ""

    def help(self) -> str:
        """Returns the text of `--help`."""
        width = max(map(len, self.subcommands))
        listed = "\n".join(f"  {name:<{width}}  {doc}" for name, doc in self.subcommands.items())
        return f"{self.usage}\n\nsubcommands:\n{listed}\n\n{self.notes}"

    def split(self, argv: Sequence[str]) -> tuple[str, Sequence[str]]:
        """Returns the subcommand that a command line names, and the arguments after it.

        Raises:
            UsageError: the first word is neither a subcommand nor an argument of `list`.
        """
        if not argv or argv[0].startswith("-"):
            return "list", argv
        if argv[0] in self.subcommands:
            return argv[0], argv[1:]
        self._check_argument(argv[0])
        return "list", argv

    def _check_argument(self, word: str) -> None:
        hint = closest(word, self.subcommands)
        problem = f"`eventloop {self.name}` has no subcommand {word!r}{hint}"
        fix = f"one of {', '.join(self.subcommands)}"
        if not self.list_argument:
            raise UsageError(problem, fix=fix)
        # A word that resembles no subcommand is an argument; `list` reports it if it doesn't exist.
        if hint and not Path(word).exists():
            raise UsageError(
                f"{problem}, and there is no such {self.list_argument.lower()}",
                fix=f"{fix}, or the folder of a {self.list_argument.lower()}",
            )
