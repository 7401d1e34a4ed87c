"""Problems with the names and distributions of plugins and extensions."""

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
    """Finds discovered plugins that share a name, or whose name or distribution is invalid."""
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
    """Finds plugins with reserved names, and plugins that share a name."""
    by_name: dict[str, Plugin] = {}
    for plugin in plugins:
        if plugin.role == "core":
            continue
        if fold(plugin.name) in RESERVED and plugin.role != "task":
            yield PluginError(
                f"a plugin can't be named {plugin.name!r}: {' and '.join(RESERVED)} are reserved",
                subjects=[plugin],
                plugin=plugin.origin,
                fix="give it another `name`",
            )
            continue
        namesake = by_name.setdefault(fold(plugin.name), plugin)
        if namesake is not plugin:
            yield PluginError(
                f"two plugins are named {plugin.name!r}: {namesake.origin} and {plugin.origin}",
                subjects=[namesake, plugin],
                fix="give one of them another `name`, or leave it out",
            )


def extension_problems(
    extensions: Iterable[Found], core_names: Mapping[str, Collection[str]]
) -> dict[Found, PluginError]:
    """Returns the problems of extensions, as far as metadata shows them.

    Args:
        extensions: of packages.
        core_names: the names that the core uses itself, by role.
    """
    by_name: dict[tuple[str, str], list[Found]] = {}
    for extension in extensions:
        by_name.setdefault((extension.role, fold(extension.name)), []).append(extension)
    problems = {}
    for (role, name), group in by_name.items():
        if name in map(fold, core_names.get(role, ())):
            problems.update(dict.fromkeys(group, _taken(group)))
        elif len(group) > 1:
            problems.update(dict.fromkeys(group, _several_packages(group)))
        elif problem := _unusable_extension(group[0]):
            problems[group[0]] = problem
        elif not group[0].distribution:
            subject = f"the {role} {group[0].name!r}"
            fix = "install it again, or delete its folder"
            problems[group[0]] = _nameless(group[0], subject, fix)
    return problems


def is_usable_name(name: str) -> bool:
    """Returns whether a plugin can have this name: `--NAME.option` must be unambiguous."""
    return fold(name) not in RESERVED and _NAME.fullmatch(name) is not None


def _several(group: Sequence[Found]) -> PluginError:
    installed = _installed(group)
    choice = "keep one with " + " or ".join(pip("uninstall", name) for name in installed)
    if len({*installed}) < len(installed):
        points = (f"{name.entry_point.group}: {name.name}" for name in group)
        choice = f"rename one of the entry points {' and '.join(points)}"
    return PluginError(
        f"{len(group)} plugins are named {group[0].name!r}: {' and '.join(_distributions(group))}",
        subjects=group,
        fix=f"{choice}, or switch all off with " + switch_off(group[0].name)
        if installed
        else "leave one of them out, or give one another `name`",
    )


def _unusable(plugin: Found) -> PluginError:
    return plugin.problem(
        f"a plugin can't be named {plugin.name!r}: names are letters, digits and single dashes, "
        f"and {' and '.join(RESERVED)} are reserved",
        ("give it another `name`, or " if plugin.local else "rename its entry point, or ")
        + plugin.way_out,
    )


def _taken(group: Iterable[Found]) -> PluginError:
    extension, *_ = group
    return PluginError(
        f"the {extension.role} {extension.name!r} of {' and '.join(_distributions(group))} isn't reached: torch-eventloop has a "
        f"{extension.role} of this name",
        fix=f"rename its entry point, or {pip('uninstall', *_installed(group))}",
    )


def _several_packages(group: Collection[Found]) -> PluginError:
    extension, *_ = group
    removal = " or ".join(pip("uninstall", name) for name in _installed(group))
    return PluginError(
        f"{len(group)} packages add the {extension.role} {extension.name!r}: "
        f"{' and '.join(_distributions(group))}",
        fix=f"keep one of them: {removal}",
    )


def _unusable_extension(extension: Found) -> PluginError | None:
    """Returns the problem of an invalid name; a storage must be named after a URL's scheme."""
    rule = "letters, digits and single dashes"
    is_usable = is_usable_name(extension.name)
    if extension.role == "storage":
        rule = "schemes of URLs, such as `s3`, or `*` for all"
        is_usable = extension.name == "*" or bool(_SCHEME.fullmatch(extension.name))
    if is_usable:
        return None
    return PluginError(
        f"a {extension.role} can't be named {extension.name!r}: names are {rule}",
        plugin=extension.origin,
        fix="rename its entry point",
    )


def _nameless(discovered: Found, subject: str, fix: str) -> PluginError:
    """Returns the error for an entry point of a distribution that has no name or version."""
    distribution = discovered.entry_point.dist
    fields = {} if distribution is None else {"folder": folder_of(distribution)}
    return PluginError(
        f"{subject} comes from a distribution without a name and version: its METADATA is gone or can't "
        "be read, as an interrupted installation leaves it",
        subjects=[discovered],
        entry_point=f"{discovered.entry_point.group}: {discovered.name} = {discovered.entry_point.value}",
        **fields,
        fix=fix,
    )


def _distributions(group: Iterable[Found]) -> list[str]:
    """Returns distributions with their versions, or entry points' values if there are none."""
    return [
        f"{discovered.distribution} {discovered.version}".strip() or discovered.entry_point.value
        for discovered in group
    ]


def _installed(group: Iterable[Found]) -> list[str]:
    """Returns the names of the distributions, which pip can uninstall."""
    return [discovered.distribution for discovered in group if discovered.distribution]
