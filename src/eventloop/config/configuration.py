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
            flags: from the command line, or the keywords of `Trainer`; by dotted key.
            kind: which of the two.
            typed_names: the flags as they were typed, `--Max_Duration`, by folded key.
            choice: from `-p` and `--no-plugins`.
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
        given = {
            fold(key): Value(
                value, origin, typed_names.get(fold(key), key if origin != "flag" else "")
            )
            for key, value in (flags or {}).items()
        }
        if not choice.autoload:
            given["autoload"] = Value(False, choice.autoload_reason)
        file = [] if config_file is None else [yaml_layer(config_file)]
        found = find_pyproject(directory or Path.cwd())
        pyproject = [] if found is None else [pyproject_layer(*found)]
        layers = [Layer(kind, given), environment_layer(environ), *file, *pyproject]
        return cls(tuple(layers), _choice(choice, layers), _rules(layers, environ))

    @property
    def local(self) -> tuple[Local, ...]:
        """The plugins that aren't installed; a flag takes precedence over a file."""
        flagged = [Local(label) for label in self.choice.files]
        labels = set(self.choice.files)
        return (*flagged, *(one for one in self.rules.local if one.label not in labels))

    def with_task(self, task_settings: Mapping[str, object]) -> Configuration:
        """Returns the configuration with the task's `autoload`, weaker than any other."""
        layers = [*self.layers, Layer("keyword", _of_task(task_settings))]
        return replace(self, choice=_choice(self.choice, layers))

    def who_insists(self, found: Found) -> Reason | None:
        """Returns what requested a plugin by name, a flag or `required`, so that it isn't left out; or None."""
        named = found.entry_point.value if found.by_flag else found.name
        if found.by_flag or fold(named) in map(fold, self.choice.insist):
            return Reason(f"-p {named}", "flag", f"leave {shell('-p', named)} out")
        return self.rules.requires(found.name)

    def section(self, name: str) -> dict[str, Value]:
        """Returns the options that were set for a plugin, or for "task", by folded name."""
        prefix = f"{fold(name)}."
        return {
            key.removeprefix(prefix): value
            for layer in reversed(self.layers)
            for key, value in layer.values.items()
            if key.startswith(prefix)
        }

    def setting_values(self, task_settings: Mapping[str, object] | None = None) -> dict[str, Value]:
        """Returns every setting as it was written, in the order of `Settings`.

        Args:
            task_settings: the task's values: weaker than everything but the default.
        """
        values = {
            name: Value(option.default, "default") for name, option in setting_options().items()
        }
        weakest_first = [Layer("keyword", _of_task(task_settings)), *reversed(self.layers)]
        for layer in weakest_first:
            values |= {key: value for key, value in layer.values.items() if key in values}
        return values

    def setting(self, name: str) -> Any:
        """Returns one setting, without the task's value; raises SettingError if it is invalid."""
        return typed(setting_options()[name], self.setting_values()[name], convert=convert_setting)

    def settings(self, task_settings: Mapping[str, object] | None = None) -> Settings:
        """Returns the settings of the run.

        Raises:
            SettingError: a setting is unknown, has the wrong type, or is out of range; all such
                problems at once.
        """
        problems = list(unknown_settings(self.layers))
        problems += [
            unknown_name("keyword", *one, SETTING_NAMES)
            for one in _of_task(task_settings).items()
            if one[0] not in SETTING_NAMES
        ]
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
    """Adds the strongest layer's value of `autoload` to the choice."""
    for layer in layers:
        if value := layer.values.get("autoload"):
            autoload = autoload_of(value)
            written = f"autoload={str(autoload).lower()}, {value.source}"
            reason = value.source if layer.kind == "variable" else written
            return replace(
                choice,
                autoload=autoload,
                autoload_reason=choice.autoload_reason or ("" if autoload is True else reason),
            )
    return choice


def _rules(layers: Sequence[Layer], environ: Mapping[str, str]) -> Rules:
    site = site_rules(environ)
    rules = Rules.read([layer.rules for layer in layers], site, environ.get(SITE_VARIABLE, ""))
    switched_off = layers[0].values.get("autoload")
    if switched_off is None or autoload_of(switched_off):
        return rules
    # Who switches autoload off by flag or keyword is stronger than the project, not than the site.
    by_site = tuple(one for one in rules.required if one.source == rules.site)
    return replace(rules, required=by_site)


def _of_task(settings: Mapping[str, object] | None) -> dict[str, Value]:
    return {fold(key): Value(value, "task", key) for key, value in (settings or {}).items()}
