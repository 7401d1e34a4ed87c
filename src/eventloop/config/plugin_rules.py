"""The rules of a project or site about plugins, which `plugin/choose` and `plugin/configured_order` apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Local, Reason
from eventloop.errors import SettingError
from eventloop.naming import fold, is_in_range, split_requirement

KEYS = ("plugins", "disable", "allow", "required", "order", "owners")


@dataclass(frozen=True)
class Requirement:
    """A plugin that must be active.

    Args:
        name: the plugin's name, as written.
        specifier: the accepted versions, in pip's syntax: ">=0.2"; "" for any version.
        source: the file that requires the plugin.
    """

    name: str
    specifier: str
    source: str

    def accepts(self, version: str) -> bool:
        """Whether a version is in the accepted range; pre-releases in the range are accepted."""
        return is_in_range(version, self.specifier)


@dataclass(frozen=True)
class Rules:
    """The configuration's rules about plugins.

    A list is taken from the strongest layer that has it, and tables are merged by entry. The site's
    rules are added to the result, and can't be overridden. Each `Value` has its source.

    Args:
        local: plugins from files and modules.
        disable: disabled plugins, by folded name.
        allow: lists of plugins; a plugin can only be active if it is in all of them.
        required: plugins that must be active.
        owners: a plugin's name or "task", by action.
        orders: names of plugins in order, by hook; the site's table before the project's.
        site: the name of the site's file in messages; "" if there is no such file.
    """

    local: tuple[Local, ...] = ()
    disable: Mapping[str, Value] = field(default_factory=dict)
    allow: tuple[Value, ...] = ()
    required: tuple[Requirement, ...] = ()
    owners: Mapping[str, Value] = field(default_factory=dict)
    orders: tuple[Mapping[str, Value], ...] = ()
    site: str = ""

    @classmethod
    def read(
        cls,
        layers: Sequence[Mapping[str, Value]],
        site: Mapping[str, Value] | None = None,
        site_name: str = "",
    ) -> Rules:
        """Reads the entries of `KEYS` from the layers.

        Args:
            layers: the rules of each layer, strongest first.
            site: the site's rules, which no layer can override.
            site_name: the name of the site's file in messages.

        Raises:
            SettingError: an entry has the wrong form.
        """
        site = site or {}
        project: dict[str, Value] = {}
        for layer in reversed(layers):
            project |= layer  # the strongest layer comes last
        levels = (site, project)

        def lists(key: str) -> list[Value]:
            return [_names(key, level[key]) for level in levels if key in level]

        disable: dict[str, Value] = {}
        for names in reversed(lists("disable")):  # the site's list last, so that it wins
            for name in reversed(names.value):
                disable[fold(name)] = Value(name, names.source)
        allow = lists("allow")
        required = []
        for names in lists("required"):
            required += [_requirement(text, names.source) for text in names.value]
        local: list[Local] = []
        for level in levels:
            if "plugins" in level:
                local += level["plugins"].value
        return cls(
            local=tuple(local),
            disable=disable,
            allow=tuple(allow),
            required=tuple(required),
            owners=_owners([site, *layers]),
            orders=(_orders([site]), _orders(layers)),
            site=site_name,
        )

    def requires(self, name: str) -> Reason | None:
        """Returns the rule that requires a plugin, as the reason why it is active; None without one."""
        for requirement in self.required:
            if fold(requirement.name) == fold(name):
                fix = f"take {name!r} out of `required = [...]`"
                return Reason(f"required, {requirement.source}", "rule", fix)
        return None


def _names(key: str, value: Value, *, example: str = '["mixup"]') -> Value:
    """Reads a list of names; raises SettingError for anything else, and for a name given twice."""
    names = value.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SettingError(
            f"{key} should be a list of names, not {names!r}",
            source=value.source,
            fix=f"write {key} = {example}",
        )
    folded = [fold(name) for name in names]
    for name in names:
        if folded.count(fold(name)) > 1:
            raise SettingError(
                f"{key} names {name!r} twice", source=value.source, fix="leave one of them out"
            )
    return Value(tuple(names), value.source)


def _requirement(text: str, source: str) -> Requirement:
    name_and_specifier = split_requirement(text)
    if name_and_specifier is None:
        raise SettingError(
            f"required has {text!r}, which isn't a plugin's name with optional versions",
            source=source,
            fix='write required = ["ema", "mixup>=0.2,<1"]',
        )
    return Requirement(*name_and_specifier, source)


def _orders(layers: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    example = 'before_forward = ["mixup", "ema"]'
    return {
        hook: _names(f"order.{hook}", names, example='["mixup", "ema"]')
        for hook, names in _entries("order", layers, example)
    }


def _owners(layers: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    owners = {}
    example = 'build_optimizers = "muon"'
    for action, name in _entries("owners", layers, example):
        if not isinstance(name.value, str):
            raise SettingError(
                f"owners.{action} should be the name of a plugin, or task, not {name.value!r}",
                source=name.source,
                fix=f"write [tool.eventloop.owners] {example}",
            )
        owners[action] = name
    return owners


def _entries(
    key: str, layers: Sequence[Mapping[str, Value]], example: str
) -> Iterator[tuple[str, Value]]:
    """Yields the entries of a table from all layers, weakest first, so that stronger ones overwrite."""
    for layer in reversed(layers):
        if key not in layer:
            continue
        table = layer[key]
        if not isinstance(table.value, Mapping):
            raise SettingError(
                f"{key} should be a table, not {table.value!r}",
                source=table.source,
                fix=f"write [tool.eventloop.{key}] {example}",
            )
        for name, entry in table.value.items():
            yield str(name).replace("-", "_"), Value(entry, table.source)
