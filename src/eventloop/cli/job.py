"""Shared by commands with a TASK: turns a command line into configuration, task and plugins."""

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
from eventloop.plugin.assemble import Discovery, assemble
from eventloop.plugin.build import build, call, plugin_options, typed_options
from eventloop.plugin.plugin_attributes import facts_of
from eventloop.rng import seed_everything

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin


@dataclass(frozen=True)
class Job:
    """An interpreted command line: every key exists, and every option has the right type."""

    configuration: Configuration
    task_file: TaskFile
    plugins: tuple[Plugin, ...]
    discovery: Discovery

    def task_options(self) -> dict[str, Any]:
        """Returns the task's parameters that were set."""
        return self.task_file.typed_options(self.configuration.section("task"))

    def origin(self) -> dict[str, Any]:
        """Returns the task's entry for the manifest."""
        return self.task_file.origin(self.configuration.section("task"))

    def plugin_options(self, plugin: Plugin) -> dict[str, Any]:
        """Returns a plugin's options that were set."""
        return typed_options(plugin, self.configuration)

    def convert(self, key: str, text: str) -> Any:
        """Converts the text for a setting or an option: `seed`, `task.lr`, `mixup.alpha`.

        Raises:
            SettingError: the text can't be converted to the option's type.
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
        for plugin in self.plugins:
            if fold(plugin.name) == section:
                return plugin_options(plugin.imported)
        return {}

    def build_plugin(self, plugin: Plugin) -> Plugin:
        """Builds a plugin with its options; a run builds its own instance.

        Raises:
            PluginError: the constructor raises.
        """
        return build(plugin, self.configuration)

    def build_task(self) -> object:
        """Builds the task, with the RNG states that importing its file has left."""
        return self.task_file.build(self.configuration.section("task"))


def prepare(arguments: Arguments, command: Command, *, trains: bool = False) -> Job:
    """Reads configuration, plugins and task file, and checks all keys before anything is built.

    Args:
        arguments: the parsed command line.
        command: the command.
        trains: whether the command trains. Then plugins with `start_early` start their work, such as
            a server, while the task file is imported.

    Raises:
        UsageError: a requested plugin, setting, option or task doesn't exist.
        PluginError: a plugin can't be imported or lacks an option.
        TaskError: the task file raises.
    """
    if not arguments.task:
        raise UsageError(
            f"`eventloop {command.name}` needs a TASK",
            fix=f"name a file or module, as in `eventloop {command.name} examples/digits.py`",
        )
    configuration = configuration_of(arguments)
    discovery = Discovery(configuration)
    active_plugins, options = _plugins(configuration, discovery)
    for plugin in active_plugins if trains and is_heard() else ():
        if start := facts_of(plugin.imported).start_early:
            call(plugin, start, {})
    # Seeded after the imports of plugins and rich, which may draw. The task file and the task draw
    # from the seeded generators.
    importlib.import_module("rich.default_styles")
    seed_everything(configuration.setting("seed"))
    job = Job(configuration, load_task_file(arguments.task), active_plugins, discovery)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    problems = unknown_keys(configuration.layers, options, job.task_file.options, passed=None)
    raise_all([problem for _, problem in problems])
    job.task_options()
    return job


def _plugins(
    configuration: Configuration, discovery: Discovery
) -> tuple[tuple[Plugin, ...], dict[str, list[str] | None]]:
    """Imports the plugins, before the task is loaded; raises all problems at once.

    Returns:
        The loaded plugins, without dormant ones, and the option names of all discovered plugins.
    """
    problems = discovery.problems(configuration, passed=None)
    plugins = discovery.chosen(configuration)
    if not problems:
        plugins = tuple(discovery.loaded(plugin, configuration) for plugin in plugins)
    options: dict[str, list[str] | None] = {plugin.name: None for plugin in plugins}
    active_plugins = [plugin for plugin in plugins if plugin.stage == "loaded"]
    has_problems = bool(problems) or any(plugin.stage == "failed" for plugin in plugins)
    try:
        for plugin in () if has_problems else plugins:
            if plugin.stage in ("loaded", "dormant"):
                options[plugin.name] = list(plugin_options(plugin.imported))
        for plugin in () if has_problems else active_plugins:
            typed_options(plugin, configuration)
    except Exception:  # noqa: BLE001 - `assemble` meets it again, and reports it
        has_problems = True
    if has_problems:
        assemble(configuration, discovery, passed=None).raise_problems()
    return tuple(active_plugins), options


def job_help(arguments: Arguments, command: Command) -> str:
    """Returns the help of a command, with the options of plugins, and of the task if it is named."""
    sections = [("settings", options_help(setting_options()))]
    if arguments.task:
        task_file = load_task_file(arguments.task)
        sections.append((f"task {task_file.label}", options_help(task_file.options, "task")))
    sections.extend(_plugin_help(configuration_of(arguments)))
    return command_help(command, [(heading, text or "  no options") for heading, text in sections])


def _plugin_help(configuration: Configuration) -> Iterator[tuple[str, str]]:
    """Yields (heading, text) for the options of each plugin, and for each problem."""
    discovery = Discovery(configuration)
    chosen = discovery.chosen(configuration)
    plugins = [discovery.loaded(plugin, configuration) for plugin in chosen]
    for plugin in plugins:
        if plugin.stage in ("loaded", "dormant"):
            yield plugin.origin, options_help(plugin_options(plugin.imported), plugin.name)
    problems = (plugin.failure for plugin in plugins if plugin.failure is not None)
    for problem in dict.fromkeys(problems):
        yield "problem", "  " + problem.what
