"""Configuration: layers of values from the strongest to the weakest, and their interpretation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eventloop.config.config_files import find_pyproject, pyproject_layer, site_rules, yaml_layer
from eventloop.config.option_types import Value, typed
from eventloop.config.plugin_flags import Choice, Local, Reason
from eventloop.config.plugin_rules import Rules
from eventloop.config.settings import SETTING_NAMES, Settings, convert_setting, setting_options
from eventloop.config.unknown_names import unknown_name, unknown_settings
from eventloop.config.value_sources import SITE_VARIABLE, Layer, autoload_of, environment_layer
from eventloop.errors import SettingError, raise_all
from eventloop.fixes import shell
from eventloop.naming import fold

if TYPE_CHECKING:
    from eventloop.plugin.records import Found


@dataclass(frozen=True)
class Configuration:
    """The user's configuration.

    Args:
        layers: the strongest first: flags or keywords, environment, `--config`, `pyproject.toml`.
        choice: of plugins.
        rules: the files' rules about plugins.
    """

    layers: tuple[Layer, ...] = ()
    choice: Choice = field(default_factory=Choice)
    rules: Rules = field(default_factory=Rules)

    @classmethod
    def read(
        cls,
        flags: Mapping[str, object] | None = None,
        *,
        kind: Literal["flag", "keyword"] = "keyword",
        typed_names: Mapping[str, str] | None = None,
        choice: Choice | None = None,
        config_file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> Configuration:
        """Reads every layer; `settings` and `section` interpret the values.

        Args:
            flags: the flags of the command line, or the keywords of `Trainer`, by dotted key.
            kind: whether `flags` has flags or keywords.
            typed_names: the flags as the user typed them, `--Max_Duration`, by folded key.
            choice: the choice of plugins by `-p` and `--no-plugins`.
            config_file: the YAML file of `--config`.
            environ: the environment; by default the process's.
            directory: where the search for `pyproject.toml` starts; the working directory.

        Raises:
            SettingError: a file can't be read, `autoload` is neither true nor false, or a rule
                has the wrong form.
        """
        choice = choice or Choice()
        environ = os.environ if environ is None else environ
        origin = "flag" if kind == "flag" else "Trainer(...)"
        typed_names = typed_names or {}
        values = {}
        for key, value in (flags or {}).items():
            default_name = "" if kind == "flag" else key
            values[fold(key)] = Value(value, origin, typed_names.get(fold(key), default_name))
        if not choice.autoload:
            values["autoload"] = Value(False, choice.autoload_reason)
        layers = [Layer(kind, values), environment_layer(environ)]
        if config_file is not None:
            layers.append(yaml_layer(config_file))
        pyproject = find_pyproject(directory or Path.cwd())
        if pyproject is not None:
            layers.append(pyproject_layer(*pyproject))
        return cls(tuple(layers), _choice(choice, layers), _rules(layers, environ))

    @property
    def local(self) -> tuple[Local, ...]:
        """The plugins from files and modules; a flag takes precedence over a configuration file."""
        from_flags = [Local(label) for label in self.choice.files]
        from_files = [local for local in self.rules.local if local.label not in self.choice.files]
        return (*from_flags, *from_files)

    def with_task(self, task_settings: Mapping[str, object]) -> Configuration:
        """Returns the configuration with the task's `autoload`, which every layer overrides."""
        layers = [*self.layers, Layer("keyword", _of_task(task_settings))]
        return replace(self, choice=_choice(self.choice, layers))

    def who_insists(self, plugin: Found) -> Reason | None:
        """Returns the flag or the rule `required` that requests a plugin by name; None without either.

        Such a plugin can't be left out silently: if it isn't suitable, that is an error.
        """
        name = plugin.entry_point.value if plugin.by_flag else plugin.name
        if plugin.by_flag or fold(name) in map(fold, self.choice.insist):
            return Reason(f"-p {name}", "flag", f"leave {shell('-p', name)} out")
        return self.rules.requires(plugin.name)

    def section(self, name: str) -> dict[str, Value]:
        """Returns the options that were set for a plugin, or for "task", by folded name."""
        prefix = f"{fold(name)}."
        options = {}
        for layer in reversed(self.layers):  # weakest first, so that stronger layers overwrite it
            for key, value in layer.values.items():
                if key.startswith(prefix):
                    options[key.removeprefix(prefix)] = value
        return options

    def setting_values(self, task_settings: Mapping[str, object] | None = None) -> dict[str, Value]:
        """Returns every setting as it was written, in the order of `Settings`.

        Args:
            task_settings: the task's values, which override only the defaults.
        """
        values = {
            name: Value(option.default, "default") for name, option in setting_options().items()
        }
        weakest_first = [Layer("keyword", _of_task(task_settings)), *reversed(self.layers)]
        for layer in weakest_first:
            values |= {key: value for key, value in layer.values.items() if key in values}
        return values

    def setting(self, name: str) -> Any:
        """Returns a setting, ignoring the task's value; raises SettingError if it is invalid."""
        return typed(setting_options()[name], self.setting_values()[name], convert=convert_setting)

    def settings(self, task_settings: Mapping[str, object] | None = None) -> Settings:
        """Returns the settings of the run.

        Raises:
            SettingError: a setting is unknown, has the wrong type, or is out of range; all such
                problems at once.
        """
        problems = list(unknown_settings(self.layers))
        for key, value in _of_task(task_settings).items():
            if key not in SETTING_NAMES:
                problems.append(unknown_name("keyword", key, value, SETTING_NAMES))
        values = self.setting_values(task_settings)
        converted = {}
        for name, option in setting_options().items():
            try:
                converted[name] = typed(option, values[name], convert=convert_setting)
            except SettingError as error:
                problems.append(error)
        raise_all(problems, "the configuration", SettingError)
        return Settings(**converted)


def _choice(choice: Choice, layers: Sequence[Layer]) -> Choice:
    """Returns the choice with the strongest layer's value of `autoload`."""
    for layer in layers:
        value = layer.values.get("autoload")
        if value is None:
            continue
        autoload = autoload_of(value)
        reason = ""
        if autoload is not True and layer.kind == "variable":
            reason = value.source  # the variable's name says it all
        elif autoload is not True:
            reason = f"autoload={str(autoload).lower()}, {value.source}"
        return replace(choice, autoload=autoload, autoload_reason=choice.autoload_reason or reason)
    return choice


def _rules(layers: Sequence[Layer], environ: Mapping[str, str]) -> Rules:
    site = site_rules(environ)
    rules = Rules.read([layer.rules for layer in layers], site, environ.get(SITE_VARIABLE, ""))
    switched_off = layers[0].values.get("autoload")
    if switched_off is None or autoload_of(switched_off):
        return rules
    # A flag or keyword that switches autoload off overrides the project's `required`, but not the site's.
    required_by_site = tuple(
        requirement for requirement in rules.required if requirement.source == rules.site
    )
    return replace(rules, required=required_by_site)


def _of_task(settings: Mapping[str, object] | None) -> dict[str, Value]:
    return {fold(key): Value(value, "task", key) for key, value in (settings or {}).items()}
