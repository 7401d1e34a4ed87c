"""Shared by subcommands of `eventloop plugins`: the registry, extensions, and remarks on hooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from eventloop.cli.arguments import Arguments, Command, configuration_of, refuse_flags
from eventloop.cli.command_registry import COMMANDS
from eventloop.cli.printing import stdout_to_stderr
from eventloop.config.configuration import Configuration
from eventloop.config.settings import SETTING_NAMES
from eventloop.errors import EventloopError, UsageError, raise_all
from eventloop.hook_markers import warnings_of
from eventloop.naming import fold
from eventloop.plugin.assemble import Discovery, assemble
from eventloop.plugin.discover import extensions
from eventloop.plugin.load import imported_callable
from eventloop.plugin.name_problems import extension_problems
from eventloop.plugin.order import Ordered
from eventloop.plugin.records import Found
from eventloop.plugin.registry import Registry, found_subjects
from eventloop.plugin.validate import unknown_edges


def read_registry(arguments: Arguments, command: Command) -> tuple[Configuration, Registry]:
    """Builds and orders all plugins; their output goes to stderr.

    Raises:
        UsageError: a flag is neither a setting nor a plugin's option.
    """
    refuse_flags(arguments, command, SETTING_NAMES)
    configuration = configuration_of(arguments)
    with stdout_to_stderr():
        return configuration, assemble(configuration)


def chosen_plugins(arguments: Arguments) -> list[Found]:
    """Returns the chosen plugins, without importing them; some may turn out to be dormant."""
    configuration = configuration_of(arguments)
    plugins = Discovery(configuration).chosen(configuration)
    return [plugin.found for plugin in plugins if plugin.found and plugin.stage == "chosen"]


def refuse_choice(registry: Registry) -> None:
    """Raises problems with the choice of plugins, such as unknown names, after the output.

    Raises:
        UsageError: the choice has a problem that belongs to no plugin.
    """
    usage_errors = [problem for problem in registry.problems if isinstance(problem, UsageError)]
    raise_all([problem for problem in usage_errors if not found_subjects(problem)])


def remarks(registry: Registry, ordered: Ordered) -> Iterator[str]:
    """Yields remarks on a hook: unknown edges, deprecations, version ranges that are too wide."""
    for implementation, name in unknown_edges(ordered, registry.names):
        yield f"{implementation.origin}: an edge to {name}, which isn't installed"
    for implementation in ordered:
        hook = implementation.hook
        for warning in warnings_of(hook, implementation.argnames):
            yield f"{implementation.origin}: {warning}"
        plugin = implementation.plugin.found
        needs = plugin.needs if plugin else ""
        since = "" if hook.declared_by else hook.since
        if since and needs and _admits_older(needs, since):
            yield (
                f"{implementation.origin}: the hook was added in torch-eventloop {since}, but the plugin "
                f"requires {needs}: require >={since}"
            )


def _admits_older(specifier: str, version: str) -> bool:
    """Returns whether a version range contains versions older than `version`."""
    lowest = [
        Version(clause.version.removesuffix(".*"))
        for clause in SpecifierSet(specifier)
        if clause.operator in (">=", ">", "==", "~=")
    ]
    return not lowest or max(lowest) < Version(version)


@dataclass(frozen=True)
class Extension:
    """A discovered extension.

    Args:
        found: its metadata.
        reason: a line that says why it can't be used, or "".
        problem: the whole error, or None.
    """

    found: Found
    reason: str = ""
    problem: EventloopError | None = None

    @property
    def status(self) -> str:
        """The text of the status column."""
        return "problem" if self.reason else "available"


def imported_extensions(name: str | None = None) -> Iterator[Extension]:
    """Imports installed extensions; yields them with their problems.

    Args:
        name: imports only extensions of this name; by default all.
    """
    added = extensions()
    problems: dict[Found, EventloopError] = {**extension_problems(added, {"command": COMMANDS})}
    for extension in added:
        if name is not None and fold(extension.name) != fold(name):
            continue
        if extension not in problems:
            try:
                with stdout_to_stderr():
                    _import(extension)
            except EventloopError as error:
                problems[extension] = error
        problem = problems.get(extension)
        yield Extension(extension, problem.what if problem else "", problem)


def _import(extension: Found) -> None:
    if extension.role == "storage":
        from eventloop.checkpoint.locations import imported_storage  # imports torch

        imported_storage(extension)
    else:
        imported_callable(extension)
