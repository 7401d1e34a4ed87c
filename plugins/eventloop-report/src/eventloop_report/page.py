"""The page: one HTML file without references to others, whatever characters names contain."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #fff; --line: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0f1318; --line: #3d444d }
}
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
.status { color: var(--soft); margin-top: .2rem; overflow-wrap: anywhere }
.failed { color: #d55e00; font-weight: bold }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; margin-top: 2rem }
.plots svg { width: 100%; height: auto; font-family: system-ui, sans-serif }
figure { margin: 0 } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
th { color: var(--soft); font-weight: normal }
td:first-child, th { overflow-wrap: normal }
td.number { text-align: right; white-space: nowrap }
""".strip()


@dataclass(frozen=True)
class Table:
    """Rows under a heading.

    Args:
        title: of the section.
        rows: texts and numbers; numbers are right-aligned.
        columns: above them; nothing for pairs of a name and a value.
        note: a line below.
    """

    title: str
    rows: Sequence[Sequence[Any]]
    columns: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of the page.

    Args:
        title: the run.
        status: how it ended, in a line.
        failed: whether it failed.
        plots: SVG elements with the title of each; the only thing that isn't escaped.
        tables: above the plots those without columns, below them the others.
        note: a line below the plots.
    """

    title: str
    status: str
    failed: bool = False
    plots: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    note: str = ""

    def html(self) -> str:
        """Returns the whole file's text."""
        plots = (
            f'<figure aria-label="{_text(title)}">{svg}</figure>'
            for title, svg in self.plots.items()
        )
        return "\n".join(
            [
                "<!DOCTYPE html>",
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width">',
                # Nothing is fetched and nothing run, should a name get through.
                '<meta http-equiv="Content-Security-Policy" '
                "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
                f"<title>{_text(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                "</head>",
                "<body>",
                f"<h1>{_text(self.title)}</h1>",
                f'<p class="status{" failed" if self.failed else ""}">{_text(self.status)}</p>',
                *_tables(table for table in self.tables if not table.columns),
                '<div class="plots">',
                *plots,
                "</div>",
                f'<p class="status">{_text(self.note)}</p>' if self.note else "",
                *_tables(table for table in self.tables if table.columns),
                "</body>",
                "</html>",
                "",
            ]
        )


def number(value: float) -> str:
    """Writes a number with four digits that count."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def _tables(tables: Iterable[Table]) -> Iterable[str]:
    for table in tables:
        yield f'<h2>{_text(table.title)}</h2>\n<div class="scroll"><table>'
        if table.columns:
            yield f"<tr>{''.join(f'<th>{_text(column)}</th>' for column in table.columns)}</tr>"
        for row in table.rows:
            yield f"<tr>{''.join(map(_cell, row))}</tr>"
        yield "</table></div>"
        if table.note:
            yield f'<p class="status">{_text(table.note)}</p>'


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f'<td class="number">{_text(number(value))}</td>'
    return f"<td>{_text(str(value))}</td>"


def _text(text: str) -> str:
    """Escapes a text; what isn't a character, or moves others about, is shown as a question mark."""
    text = text.encode("utf-8", "replace").decode()
    return html.escape("".join(char if char.isprintable() else "?" for char in text))
