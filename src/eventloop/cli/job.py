"""Shared by commands with a TASK: from a command line to a trainer; its header is in `header`."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import Arguments, Command, command_help, configuration_of, options_help
from eventloop.cli.printing import is_heard
from eventloop.cli.task_file import TaskFile, load_task_file
from eventloop.config.configuration import Configuration
from eventloop.config.option_types import Option, Value, typed
from eventloop.config.settings import convert_setting, setting_options
from eventloop.config.unknown_names import unknown_keys
from eventloop.errors import UsageError, closest, raise_all
from eventloop.naming import fold
from eventloop.plugin.candidates import Candidates, dry_assemble, select_all
from eventloop.plugin.configure import (
    build,
    configure,
    dormant_reason,
    plugin_options,
    typed_options,
)
from eventloop.plugin.load import load
from eventloop.plugin.name_problems import name_problems
from eventloop.plugin.plugin_attributes import facts_of
from eventloop.rng import seed_everything

if TYPE_CHECKING:
    from eventloop.plugin.records import Candidate, Plugin


@dataclass(frozen=True)
class Job:
    """An interpreted command line: every key is known, every option is typed."""

    configuration: Configuration
    task_file: TaskFile
    plugins: tuple[Candidate, ...]
    candidates: Candidates

    def task_options(self) -> dict[str, Any]:
        """Returns the task's parameters that were set."""
        return self.task_file.typed_options(self.configuration.section("task"))

    def origin(self) -> dict[str, Any]:
        """Returns the task's entry for the manifest."""
        return self.task_file.origin(self.configuration.section("task"))

    def plugin_options(self, plugin: Candidate) -> dict[str, Any]:
        """Returns a plugin's options that were set."""
        values = self.configuration.section(plugin.found.name)
        return typed_options(plugin.found, plugin.target, values)

    def convert(self, key: str, text: str) -> Any:
        """Converts the text for a setting or an option: `seed`, `task.lr`, `mixup.alpha`.

        Raises:
            SettingError: it isn't of the option's type.
            UsageError: no setting or option of this run has this name.
        """
        section, _, name = fold(key).rpartition(".")
        options = self._options_of(section)
        if name not in options:
            raise UsageError(
                f"no option of this run is named {key!r}{closest(name, options)}",
                fix=f"see `eventloop fit {self.task_file.name} --help`",
            )
        convert = None if section else convert_setting
        return typed(options[name], Value(text, "flag"), section, convert=convert)

    def _options_of(self, section: str) -> Mapping[str, Option]:
        if not section:
            return setting_options()
        if section == "task":
            return self.task_file.options
        target = (one.target for one in self.plugins if fold(one.found.name) == section)
        return plugin_options(found) if (found := next(target, None)) is not None else {}

    def build_plugin(self, plugin: Candidate) -> Plugin:
        """Builds a plugin with its options; a run builds another instance.

        Raises:
            PluginError: its constructor raises.
        """
        return configure(plugin.found, plugin.target, self.configuration.section(plugin.found.name))

    def build_task(self) -> object:
        """Builds the task, continuing the RNG state after its file."""
        return self.task_file.build(self.configuration.section("task"))


def prepare(arguments: Arguments, command: Command, *, trains: bool = False) -> Job:
    """Reads configuration, plugins and task file, and checks all keys before anything is built.

    If it `trains`, plugins start what they need for it, while the task file is imported.

    Raises:
        UsageError: something requested doesn't exist.
        PluginError: a plugin can't be imported or lacks an option.
        TaskError: the task file raises.
    """
    if not arguments.task:
        raise UsageError(
            f"`eventloop {command.name}` needs a TASK",
            fix=f"name a file or module, as in `eventloop {command.name} examples/digits.py`",
        )
    configuration = configuration_of(arguments)
    candidates = Candidates(configuration)
    awake, options = _plugins(configuration, candidates)
    for one in awake if trains and is_heard() else ():
        if start := facts_of(one.target).start_early:
            build(one.found, start, {})
    # Behind what may draw when it is imported, plugins and rich; file and task draw from here on.
    importlib.import_module("rich.default_styles")
    seed_everything(configuration.setting("seed"))
    job = Job(configuration, load_task_file(arguments.task), awake, candidates)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    problems = unknown_keys(configuration.layers, options, job.task_file.options, passed=None)
    raise_all([problem for _, problem in problems])
    job.task_options()
    return job


def _plugins(
    configuration: Configuration, candidates: Candidates
) -> tuple[tuple[Candidate, ...], dict[str, list[str] | None]]:
    """Imports the plugins before the task; raises all problems at once.

    Returns:
        The plugins that aren't dormant, and the option names of all discovered plugins.
    """
    selected, problems = select_all(configuration, passed=None, candidates=candidates)
    loaded = [candidates.loaded(one) for one in selected if one.status == "active" and not problems]
    options: dict[str, list[str] | None] = {one.found.name: None for one in selected}
    awake, is_wrong = [], bool(problems) or any(one.problems for one in loaded)
    for one in [] if is_wrong else loaded:
        try:
            options[one.found.name] = list(plugin_options(one.target))
            section = configuration.section(one.found.name)
            is_dormant = dormant_reason(one.found, one.target, section) is not None
            if not is_dormant or configuration.who_insists(one.found):
                typed_options(one.found, one.target, section)
                awake.append(one)
        except Exception:  # noqa: BLE001 - `dry_assemble` meets it again, and tells of it
            is_wrong = True
    if is_wrong:
        raise_all(dry_assemble(configuration, None, candidates).problems)
    return tuple(awake), options


def job_help(arguments: Arguments, command: Command) -> str:
    """Returns the help of a command, with the options of plugins, and of the task if given."""
    sections = [("settings", options_help(setting_options()))]
    if arguments.task:
        task_file = load_task_file(arguments.task)
        sections.append((f"task {task_file.label}", options_help(task_file.options, "task")))
    sections.extend(_plugin_help(configuration_of(arguments)))
    return command_help(command, [(heading, text or "  no options") for heading, text in sections])


def _plugin_help(configuration: Configuration) -> Iterator[tuple[str, str]]:
    """Yields a section for each plugin; the text is its problem if it has one."""
    selected, _ = select_all(configuration, passed=None)
    unusable = name_problems(selected)
    active = (one for one in selected if one.status == "active" and one.found not in unusable)
    plugins = [load(one, {}) for one in active]
    for plugin in (one for one in plugins if not one.problems):
        yield plugin.found.origin, options_help(plugin_options(plugin.target), plugin.found.name)
    problems = (problem for plugin in plugins for problem in plugin.problems)
    for problem in dict.fromkeys([*unusable.values(), *problems]):
        yield "problem", "  " + problem.what
