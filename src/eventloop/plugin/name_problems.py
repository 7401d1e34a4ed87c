"""What can be wrong with the names and distributions of plugins, and of what packages add beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from eventloop.errors import PluginError
from eventloop.fixes import pip, switch_off
from eventloop.naming import fold
from eventloop.plugin.discover import folder_of
from eventloop.plugin.records import Found, Plugin

RESERVED = ("task", "core")
_NAME = re.compile(r"[A-Za-z0-9]+(?:[-_]?[A-Za-z0-9]+)*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+", re.IGNORECASE)


def name_problems(chosen: Iterable[Plugin]) -> dict[Found | None, PluginError]:
    """Finds plugins with another's name, or with an invalid one."""
    by_name: dict[str, list[Found]] = {}
    for plugin in chosen:
        if plugin.found is not None:
            by_name.setdefault(fold(plugin.name), []).append(plugin.found)
    problems: dict[Found | None, PluginError] = {}
    for group in by_name.values():
        problem = None
        if len(group) > 1:
            problem = _several(group)
        elif not is_usable_name(group[0].name):
            problem = _unusable(group[0])
        elif group[0].path is None and not group[0].distribution:
            fix = "install it again, or switch the plugin off with " + switch_off(group[0].name)
            problem = _nameless(group[0], group[0].name, fix)
        if problem is not None:
            problems.update(dict.fromkeys(group, problem))
    return problems


def clashing_names(plugins: Iterable[Plugin]) -> Iterator[PluginError]:
    """Finds plugins with reserved names, and with names that another plugin has."""
    by_name: dict[str, Plugin] = {}
    for plugin in plugins:
        if plugin.role == "core":
            continue
        if fold(plugin.name) in RESERVED and plugin.role != "task":
            yield PluginError(
                f"a plugin can't be named {plugin.name!r}: {' and '.join(RESERVED)} stand for "
                "something else",
                subjects=[plugin],
                plugin=plugin.origin,
                fix="give it another `name`",
            )
            continue
        other = by_name.setdefault(fold(plugin.name), plugin)
        if other is not plugin:
            yield PluginError(
                f"two plugins are named {plugin.name!r}: {other.origin} and {plugin.origin}",
                subjects=[other, plugin],
                fix="give one of them another `name`, or leave it out",
            )


def extension_problems(
    found: Iterable[Found], own: Mapping[str, Collection[str]]
) -> dict[Found, PluginError]:
    """Returns the problems of extensions that metadata shows.

    Args:
        own: the names taken by the core's own, by role.
    """
    by_name: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        by_name.setdefault((one.role, fold(one.name)), []).append(one)
    problems = {}
    for (role, name), group in by_name.items():
        if name in map(fold, own.get(role, ())):
            problems.update(dict.fromkeys(group, _taken(group)))
        elif len(group) > 1:
            problems.update(dict.fromkeys(group, _several_packages(group)))
        elif problem := _unusable_extension(group[0]):
            problems[group[0]] = problem
        elif not group[0].distribution:
            who = f"the {role} {group[0].name!r}"
            fix = "install it again, or delete what is left of it"
            problems[group[0]] = _nameless(group[0], who, fix)
    return problems


def is_usable_name(name: str) -> bool:
    """Returns whether a plugin can have this name: `--NAME.option` must be unambiguous."""
    return fold(name) not in RESERVED and _NAME.fullmatch(name) is not None


def _several(group: Sequence[Found]) -> PluginError:
    installed = _installed(group)
    way = "keep one with " + " or ".join(pip("uninstall", one) for one in installed)
    if len({*installed}) < len(installed):
        points = (f"{one.entry_point.group}: {one.name}" for one in group)
        way = f"rename one of the entry points {' and '.join(points)}"
    return PluginError(
        f"{len(group)} plugins are named {group[0].name!r}: {' and '.join(_distributions(group))}",
        subjects=group,
        fix=f"{way}, or switch all off with " + switch_off(group[0].name)
        if installed
        else "leave one of them out, or give one another `name`",
    )


def _unusable(found: Found) -> PluginError:
    return found.problem(
        f"a plugin can't be named {found.name!r}: names are letters, digits and single dashes, "
        f"and {' and '.join(RESERVED)} stand for something else",
        ("give it another `name`, or " if found.local else "rename its entry point, or ")
        + found.way_out,
    )


def _taken(group: Iterable[Found]) -> PluginError:
    first, *_ = group
    return PluginError(
        f"the {first.role} {first.name!r} of {' and '.join(_distributions(group))} isn't reached: torch-eventloop has a "
        f"{first.role} of this name",
        fix=f"rename its entry point, or {pip('uninstall', *_installed(group))}",
    )


def _several_packages(group: Collection[Found]) -> PluginError:
    first, *_ = group
    removal = " or ".join(pip("uninstall", one) for one in _installed(group))
    return PluginError(
        f"{len(group)} packages add the {first.role} {first.name!r}: "
        f"{' and '.join(_distributions(group))}",
        fix=f"keep one of them: {removal}",
    )


def _unusable_extension(found: Found) -> PluginError | None:
    """Returns the problem of a name that is neither a scheme, nor one that plugins can have."""
    rule = "letters, digits and single dashes"
    is_usable = is_usable_name(found.name)
    if found.role == "storage":
        rule = "schemes of URLs, `s3` say, or `*` for all"
        is_usable = found.name == "*" or bool(_SCHEME.fullmatch(found.name))
    if is_usable:
        return None
    return PluginError(
        f"a {found.role} can't be named {found.name!r}: names are {rule}",
        plugin=found.origin,
        fix="rename its entry point",
    )


def _nameless(found: Found, who: str, fix: str) -> PluginError:
    """Returns the problem with what a distribution without a name and version adds."""
    distribution = found.entry_point.dist
    facts = {} if distribution is None else {"folder": folder_of(distribution)}
    return PluginError(
        f"{who} comes from a distribution without a name and version: its METADATA is gone or can't "
        "be read, as an interrupted installation leaves it",
        subjects=[found],
        entry_point=f"{found.entry_point.group}: {found.name} = {found.entry_point.value}",
        **facts,
        fix=fix,
    )


def _distributions(group: Iterable[Found]) -> list[str]:
    """Returns the distributions with their versions; the entry point's value where there is none."""
    return [f"{one.distribution} {one.version}".strip() or one.entry_point.value for one in group]


def _installed(group: Iterable[Found]) -> list[str]:
    """Returns the names of distributions that pip knows."""
    return [one.distribution for one in group if one.distribution]
