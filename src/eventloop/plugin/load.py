"""Step 3, load: import what takes part, one by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from eventloop.errors import EventloopError, PluginError, text_of
from eventloop.plugin.local import import_local
from eventloop.plugin.records import EXTENSIONS, GROUPS, Candidate, Found, Selected
from eventloop.signals import Interrupted, told_from_a_key
from eventloop.text import pip


def load(
    selected: Iterable[Selected], outcomes: dict[Found, Candidate] | None = None
) -> tuple[list[Candidate], list[EventloopError]]:
    """Imports the active plugins, each once.

    Args:
        outcomes: of those that were imported before; the new ones join them.

    Returns:
        Those that could be imported, and a problem for each of the others.
    """
    outcomes = {} if outcomes is None else outcomes
    active = [one for one in selected if one.status == "active"]
    for one in active:
        if one.found not in outcomes:
            try:
                outcomes[one.found] = Candidate(one, imported(one.found))
            except PluginError as error:
                outcomes[one.found] = Candidate(one, problems=(error,))
    found = [outcomes[one.found] for one in active]
    return (
        [one for one in found if not one.problems],
        [problem for one in found for problem in one.problems],
    )


def imported(found: Found) -> object:
    """Imports what an entry point, a file or a module names.

    Raises:
        PluginError: it can't be imported.
    """
    try:
        with told_from_a_key(), _where_it_was():
            return found.entry_point.load() if found.local is None else import_local(found)
    except Interrupted:
        raise
    # Whatever its code does when imported, SystemExit too, is that package's problem.
    except BaseException as error:
        raise _problem(found, error) from error


@contextmanager
def _where_it_was() -> Iterator[None]:
    """Comes back to the working directory, which a module may change while it is imported."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - as text, for it may be gone
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        os.chdir(folder)


def _problem(found: Found, error: BaseException) -> PluginError:
    what = "plugin" if found.role in GROUPS.values() else found.role
    way_out = found.way_out
    if found.role in EXTENSIONS.values():
        way_out = (
            f"install it with all that it needs, {pip('install', found.distribution)}, or remove it "
            f"with {pip('uninstall', found.distribution)}"
        )
    elif found.local is not None:
        way_out = f"fix the error, or {way_out}"
    else:
        way_out += f", or remove it with {pip('uninstall', found.distribution)}"
    return found.problem(
        f"{what} {found.name!r} can't be imported: {type(error).__name__}: {text_of(error)}",
        way_out,
        entry_point=f"{found.entry_point.group}: {found.entry_point.value}",
    )
