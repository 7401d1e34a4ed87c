"""What can be wrong with an extension: its name, its distribution, its import, its target."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from eventloop.errors import PluginError
from eventloop.naming import fold
from eventloop.plugin.load import imported
from eventloop.plugin.records import Found
from eventloop.plugin.select import distributions, installed, is_usable_name, nameless
from eventloop.text import pip

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+", re.IGNORECASE)


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
            problems.update(dict.fromkeys(group, _several(group)))
        elif problem := _unusable(group[0]):
            problems[group[0]] = problem
        elif not group[0].distribution:
            who = f"the {role} {group[0].name!r}"
            fix = "install it again, or delete what is left of it"
            problems[group[0]] = nameless(group[0], who, fix)
    return problems


def imported_callable(found: Found) -> Callable[..., Any]:
    """Imports the class or function that an extension's entry point names.

    Raises:
        PluginError: it can't be imported, or can't be called.
    """
    target = imported(found)
    if not callable(target):
        raise PluginError(
            f"{found.role} {found.name!r} can't be called: its entry point names {target!r}",
            plugin=found.origin,
            entry_point=f"{found.entry_point.group}: {found.entry_point.value}",
            fix=f"name a function, `{found.name} = {found.entry_point.module}:run`",
        )
    return target


def _taken(group: Iterable[Found]) -> PluginError:
    first, *_ = group
    return PluginError(
        f"the {first.role} {first.name!r} of {' and '.join(distributions(group))} isn't reached: torch-eventloop has a "
        f"{first.role} of this name",
        fix=f"rename its entry point, or {pip('uninstall', *installed(group))}",
    )


def _several(group: Collection[Found]) -> PluginError:
    first, *_ = group
    removal = " or ".join(pip("uninstall", one) for one in installed(group))
    return PluginError(
        f"{len(group)} packages add the {first.role} {first.name!r}: "
        f"{' and '.join(distributions(group))}",
        fix=f"keep one of them: {removal}",
    )


def _unusable(found: Found) -> PluginError | None:
    """Returns the problem of a name that is neither a scheme, nor one that plugins can have."""
    rule, is_usable = "letters, digits and single dashes", is_usable_name(found.name)
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
