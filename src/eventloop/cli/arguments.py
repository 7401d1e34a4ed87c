"""Parses command lines, before task and plugins are known, and formats help texts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.config.option_types import Option, flag
from eventloop.config.plugin_flags import Choice
from eventloop.errors import UsageError, closest
from eventloop.fixes import install, published, shell
from eventloop.naming import fold

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.run.differences import Allowed

_NEGATIVE = re.compile(r"-\.?[0-9].*")
_WIDTH = 88
_INDENT = " " * 6


@dataclass(frozen=True)
class CommandOption:
    """An option of the command itself, not a setting.

    Args:
        name: without dashes in front, `print-config`.
        metavar: the name of its value in help; "" for a switch without a value.
        doc: its description in help.
    """

    name: str
    metavar: str
    doc: str


@dataclass(frozen=True)
class Command:
    """The description of a command, and the arguments that it accepts.

    Args:
        name: with its subcommand, `plugins show`.
        summary: its description in help.
        options: its own options.
        argument: its positional arguments, "A B" for two; in brackets if optional, "" for none.
        takes_plugins: whether plugins can be chosen, and settings read from a file.
        takes_options: whether settings, and options of plugins, have an effect.
    """

    name: str
    summary: str
    options: tuple[CommandOption, ...] = ()
    argument: str = "TASK"
    takes_plugins: bool = True
    takes_options: bool = True

    @property
    def takes_task(self) -> bool:
        """Whether the command takes a task, and therefore settings and options."""
        return self.argument == "TASK"

    @property
    def usage(self) -> str:
        """The usage line: `eventloop fit TASK [OPTIONS]`."""
        return " ".join(filter(None, ["eventloop", self.name, self.argument, "[OPTIONS]"]))

    def all_options(self) -> dict[str, CommandOption]:
        """Returns its own options and the options of every command, by folded name."""
        common = _COMMON if self.takes_plugins else (_HELP,)
        return {fold(option.name): option for option in (*common, *self.options)}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line whose values haven't been interpreted.

    Args:
        task: TASK, or another positional argument, as typed; "" if it is missing.
        flags: settings and options as text, by folded key.
        typed_names: the keys of `flags` as they were typed, `--Max_Duration`, by folded key.
        given: the values of the command's own options, by folded name; "" for a switch.
        choice: the plugins that `-p` and `--no-plugins` select.
        words: all positional arguments.
        argv: the whole command line.
    """

    task: str = ""
    flags: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    words: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    typed_names: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path | None:
        """Returns the value of an own option as a path; None if it isn't set."""
        return Path(self.given[name]) if name in self.given else None

    def count(self, name: str, default: int = 1) -> int:
        """Returns the value of an own option as a count.

        Raises:
            UsageError: it isn't a whole number, or is less than 1.
        """
        text = self.given.get(fold(name), str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) > 0):
            raise UsageError(
                f"{flag(name)} takes a whole number, 1 or more, not {text!r}",
                fix=f"write a number, such as `{flag(name)} 2`",
            )
        return int(text)


_HELP = CommandOption("help", "", "show this help")
_COMMON = (
    CommandOption("help", "", "show this help; with TASK, its options too"),
    CommandOption("config", "FILE", "read settings and options from a YAML file"),
    CommandOption("no-plugins", "", "leave installed plugins out, except plugins named with -p"),
)


def read_arguments(argv: Sequence[str], command: Command) -> Arguments:
    """Parses a command line; long options can have dashes or underscores.

    Raises:
        UsageError: an option lacks its value, an own option is given twice, or there are too many
            positional arguments.
    """
    options = command.all_options()
    switches = {name for name, option in options.items() if not option.metavar}
    flags: dict[str, str] = {}
    given: dict[str, str] = {}
    typed_names: dict[str, str] = {}
    plugins: list[str] = []
    words: list[str] = []
    for name, value in _pairs(argv, switches):
        key = fold(name.removeprefix("--"))
        if name == "-p":
            if not command.takes_plugins:
                raise UsageError(
                    f"`eventloop {command.name}` takes no -p: no plugin takes part in it",
                    fix=f"write it as `{command.usage}`",
                )
            plugins.append(value)
        elif not name:
            words.append(value)
        elif key in options:
            if value and key in given and options[key].metavar == "NAMES":
                value = f"{given[key]},{value}"  # as with -p
            elif value and key in given:
                raise UsageError(
                    f"{name} is given twice, as {given[key]!r} and as {value!r}",
                    fix="leave one of them out; merge two files into one",
                )
            given[key] = value
        else:
            flags[key] = value
            typed_names[key] = name
    if len(words) > len(command.argument.split()):
        raise _unexpected(words[-1], argv, options, command)
    choice = _choice(Choice.parse(plugins), flags, "no_plugins" in given)
    return Arguments(
        words[0] if words else "", flags, given, choice, tuple(words), tuple(argv), typed_names
    )


def _unexpected(
    word: str, argv: Sequence[str], options: Mapping[str, CommandOption], command: Command
) -> UsageError:
    """Returns the error for a surplus word, which may be meant as the value of a switch before it."""
    previous_word = argv[argv.index(word) - 1] if word in argv[1:] else ""
    option = (
        options.get(fold(previous_word.removeprefix("--"))) if previous_word[:2] == "--" else None
    )
    if option is None or option.metavar:
        return UsageError(f"{word!r} isn't expected here", fix=f"write it as `{command.usage}`")
    fix = f"write only {shell(previous_word)}"
    base = previous_word.rpartition("-")[0]
    owner = options.get(fold(base.removeprefix("--")))
    if owner is not None and owner.metavar:  # --export-best modifies --export, which takes a value
        fix = f"write {shell(base, word, previous_word)}"
    return UsageError(f"{previous_word} takes no value, but {word!r} follows", fix=fix)


def refuse_flags(arguments: Arguments, command: Command, allowed: Collection[str] = ()) -> None:
    """Refuses settings and options that would have no effect.

    Args:
        arguments: the parsed command line.
        command: the command.
        allowed: the settings that have an effect. If there are any, plugin options are allowed, too.

    Raises:
        UsageError: the command line has other settings or options.
    """
    for key in arguments.flags:
        if allowed and ("." in key or key in allowed):
            continue
        raise UsageError(
            f"`eventloop {command.name}` has no option {arguments.typed_names.get(key, key)!r}"
            f"{closest(key, command.all_options())}",
            fix=f"list its options with `eventloop {command.name} --help`",
        )


def _pairs(argv: Sequence[str], switches: set[str]) -> Iterator[tuple[str, str]]:
    """Yields each option with its value; a positional argument has the name ""."""
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "-h":
            yield "--help", ""
        elif word.startswith("-p") and not word.startswith("--"):
            yield "-p", word[2:].removeprefix("=") or _value("-p", next(words, None))
        elif not word.startswith("-") or word == "-":
            yield "", word
        elif not word.startswith("--"):
            raise UsageError(f"there is no option {word!r}", fix="long options start with `--`")
        elif fold(name[2:]) in switches:
            if equals:
                raise UsageError(f"{name} takes no value, but got {value!r}", fix=f"write `{name}`")
            yield name, ""
        else:
            yield name, value if equals else _value(name, next(words, None), switches)


def _value(name: str, word: str | None, switches: Iterable[str] = ()) -> str:
    if word is None or (word.startswith("-") and not _NEGATIVE.fullmatch(word)):
        following = "nothing" if word is None else repr(word)
        flags = sorted(f"--{switch.replace('_', '-')}" for switch in switches)
        plugin = name.lstrip("-")
        plugin_hint = (
            f", or {shell('-p', plugin)} for the plugin; where it is missing, {install(plugin)}"
        )
        raise UsageError(
            f"{name} needs a value, but {following} follows"
            f"{closest(name, flags, 'the closest that takes none')}",
            fix=f"write `{name}=VALUE`{plugin_hint if plugin in published() else ''}",
        )
    return word


def _choice(choice: Choice, flags: dict[str, str], no_plugins: bool) -> Choice:
    if not no_plugins:
        return choice
    if "autoload" in flags:
        raise UsageError(
            f"--no-plugins and --autoload {flags['autoload']} are redundant or contradict each "
            "other",
            fix="leave one of them out",
        )
    return replace(choice, autoload=False, autoload_reason="--no-plugins")


JSON = CommandOption("json", "", "write JSON instead of text")
CHANGES = (
    CommandOption("allow-config-change", "", "resume though settings, options or task differ"),
    CommandOption("allow-plugin-change", "NAMES", "resume with other versions of these algorithms"),
    CommandOption(
        "allow-missing-plugin", "NAMES", "resume without these algorithms; keep their state"
    ),
    CommandOption("allow-lost-objects", "", "resume without objects that couldn't be saved"),
)


def configuration_of(arguments: Arguments) -> Configuration:
    """Reads the configuration from command line, environment and files, as `fit` does."""
    from eventloop.config.configuration import Configuration  # not needed by every command

    return Configuration.read(
        arguments.flags,
        kind="flag",
        typed_names=arguments.typed_names,
        choice=arguments.choice,
        config_file=arguments.path("config"),
    )


def allowed(arguments: Arguments) -> Allowed:
    """Reads the `--allow-` options, which accept differences from the resumed run."""
    from eventloop.run.differences import Allowed  # imports torch, not needed by every command

    given = arguments.given
    return Allowed(
        config_change="allow_config_change" in given,
        plugin_change=_names(given.get("allow_plugin_change", "")),
        missing_plugin=_names(given.get("allow_missing_plugin", "")),
        lost_objects="allow_lost_objects" in given,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def command_help(command: Command, sections: Iterable[tuple[str, str]] = ()) -> str:
    """Returns the help text of a command.

    Args:
        command: the command.
        sections: further headings, each with its text.
    """
    plugin_entries = [
        ("-p NAME, -p no:NAME", "insist on a plugin, or switch it off"),
        ("-p FILE.py:CLASS", "add a plugin that isn't packaged; or MODULE:CLASS"),
    ]
    entries = plugin_entries if command.takes_plugins else []
    for option in command.all_options().values():
        entries.append((f"{flag(option.name)} {option.metavar}".strip(), option.doc))
    paragraphs = [f"usage: {command.usage}", textwrap.fill(command.summary, _WIDTH)]
    if command.takes_task:
        paragraphs.append(
            "TASK is a file or a dotted module with a function `task`, a `Task` object named "
            "`task`, or hook implementations."
        )
    own_section = ("options", "\n".join(_entry(*entry) for entry in entries))
    paragraphs += [f"{heading}:\n{text}" for heading, text in (own_section, *sections)]
    return "\n\n".join(paragraphs)


def options_help(options: Mapping[str, Option], section: str = "") -> str:
    """Formats options with their types and defaults."""
    return "\n".join(
        _entry(f"{flag(option.name, section)} {option.type_name}", _described(option))
        for option in options.values()
    )


def _described(option: Option) -> str:
    default = "none" if option.default is None else option.default
    requirement = "required" if option.required else f"default: {default}"
    return f"{option.doc} ({requirement})".strip()


def _entry(name: str, doc: str) -> str:
    wrapped = textwrap.wrap(doc, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([f"  {name}", *wrapped])
