"""The plugins of a run as a table, for a notebook."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from html import escape

from eventloop.plugin.records import Found, Plugin, Selected

_COLUMNS = ("plugin", "role", "package", "options")


def plugin_table(plugins: Iterable[Plugin], off: Iterable[Selected]) -> str:
    """Returns the plugins of a run in order, then those that don't take part, as HTML.

    Args:
        plugins: that take part.
        off: that don't, each with the reason.
    """
    rows = [_row(one) for one in plugins]
    left_out = [
        (one.found.name, one.found.role, _package(one.found), f"off: {one.reason}") for one in off
    ]
    return (
        f"<table><thead>{_line(_COLUMNS, 'th')}</thead><tbody>"
        f"{''.join(_line(row) for row in rows)}"
        f"{''.join(_line(row, style='opacity: 0.6') for row in left_out)}"
        "</tbody></table>"
    )


def _row(plugin: Plugin) -> Sequence[str]:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    options = ", ".join(f"{name}={short.repr(one)}" for name, one in plugin.options.items())
    return (plugin.name, plugin.role, _package(plugin) or plugin.source, options)


def _package(plugin: Plugin | Found) -> str:
    return f"{plugin.distribution} {plugin.version or ''}".strip()


def _line(cells: Iterable[str], cell: str = "td", style: str = "") -> str:
    inside = "".join(f"<{cell}>{escape(one)}</{cell}>" for one in cells)
    return f'<tr style="{style}">{inside}</tr>' if style else f"<tr>{inside}</tr>"
