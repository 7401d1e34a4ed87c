"""Reads the rules of a project or site about plugins; `plugin/choose` and `plugin/configured_order` apply them."""

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
        name: as written.
        specifier: the accepted versions, in pip's syntax: ">=0.2"; "" for any.
        source: where it is required.
    """

    name: str
    specifier: str
    source: str

    def accepts(self, version: str) -> bool:
        """Returns whether a version is accepted; pre-releases are, if they are in range."""
        return is_in_range(version, self.specifier)


@dataclass(frozen=True)
class Rules:
    """The configuration's rules about plugins.

    A list is taken from the strongest layer that has it; tables are merged by entry. The site's
    rules are added to both, and can't be overridden.

    Args:
        local: plugins from files and modules.
        disable: by folded name: the name as written, and where.
        allow: lists of the only plugins that can be active, and where each is.
        required: plugins that must be active.
        owners: by action: a plugin's name or "task", and where.
        orders: by hook: names in order, and where; the site's before the project's.
        site: the site's file, as messages name it; "" without one.
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
            layers: the strongest first.
            site: rules that no layer can override.
            site_name: the site's file.

        Raises:
            SettingError: an entry has the wrong form.
        """
        site = site or {}
        # Of a list the strongest layer's counts.
        levels = (site, {key: layer[key] for layer in reversed(layers) for key in layer})
        disable, allow, required = (
            [_names(key, level[key]) for level in levels if key in level]
            for key in ("disable", "allow", "required")
        )
        disabled = [Value(name, one.source) for one in disable for name in one.value]
        return cls(
            local=tuple(
                one for level in levels if "plugins" in level for one in level["plugins"].value
            ),
            disable={fold(value.value): value for value in reversed(disabled)},
            allow=tuple(allow),
            required=tuple(
                _requirement(text, one.source) for one in required for text in one.value
            ),
            owners=_owners([site, *layers]),
            orders=(_orders([site]), _orders(layers)),
            site=site_name,
        )

    def requires(self, name: str) -> Reason | None:
        """Returns where a plugin is required; None if it isn't."""
        wanted = (one.source for one in self.required if fold(one.name) == fold(name))
        fix = f"take {name!r} out of `required = [...]`"
        return next((Reason(f"required, {source}", "rule", fix) for source in wanted), None)


def _names(key: str, value: Value, *, example: str = '["mixup"]') -> Value:
    """Reads a list of names; raises SettingError if it isn't one, or has a name twice."""
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
    if (parts := split_requirement(text)) is None:
        raise SettingError(
            f"required has {text!r}, which is no plugin's name with versions",
            source=source,
            fix='write required = ["ema", "mixup>=0.2,<1"]',
        )
    return Requirement(*parts, source)


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
    """Yields the entries of a table, the weakest layer's first."""
    for table in (layer[key] for layer in reversed(layers) if key in layer):
        if not isinstance(table.value, Mapping):
            raise SettingError(
                f"{key} should be a table, not {table.value!r}",
                source=table.source,
                fix=f"write [tool.eventloop.{key}] {example}",
            )
        for name, entry in table.value.items():
            yield str(name).replace("-", "_"), Value(entry, table.source)
