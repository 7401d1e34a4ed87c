"""Draws `architecture.svg` from the imports of `src/eventloop`: `python docs/build_architecture.py`.

A box is a folder or a module at the root; its row is its floor in `pyproject.toml`, where
import-linter reads the order of the floors. A line leads to what a box imports, unless another line
says so already: what is reached through a lower box isn't drawn a second time.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "eventloop"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
_WIDTH, _ROW, _BOX, _MARGIN = 1_000, 62, 30, 24
_SHIFTS = (-300, 80, -170, 290, -40, 180, -250)


def floors() -> list[list[str]]:
    """Returns the rows of boxes, the highest first, as import-linter's contract has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    return [[name.strip(" ()") for name in row.replace(":", "|").split("|")] for row in layers]


def imports() -> dict[str, set[str]]:
    """Returns for each box what its code imports when it runs, types alone left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        box = _box(path.relative_to(PACKAGE).with_suffix("").parts)
        if box:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.setdefault(box, set()).update(set(_imported(tree)) - {box})
    return found


def _box(parts: tuple[str, ...]) -> str:
    return "" if parts[0] in ("__init__", "__main__") else parts[0]


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
            first, *parts = child.module.split(".")
            if first == "eventloop":
                yield from parts[:1] or (
                    alias.name for alias in child.names if _is_module(alias.name)
                )
        yield from _imported(child)


def _is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def drawn(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the lines to draw: an import that no chain of others implies."""
    below: dict[str, set[str]] = {}

    def reached(box: str) -> set[str]:
        if box not in below:
            below[box] = set()
            for one in graph.get(box, ()):
                below[box] |= {one, *reached(one)}
        return below[box]

    return sorted(
        (box, one)
        for box, direct in graph.items()
        for one in direct
        if not any(one in reached(other) for other in direct - {one})
    )


def picture() -> str:
    """Returns the picture as SVG."""
    rows = floors()
    graph = imports()
    unplaced = sorted(graph.keys() - {name for row in rows for name in row})
    if unplaced:
        raise SystemExit(f"pyproject.toml has no floor for {', '.join(unplaced)}")
    places: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(rows):
        step = (_WIDTH - 2 * _MARGIN) / len(row)
        for idx, name in enumerate(row):
            # Single boxes stand in turn at different places, so that lines pass beside them.
            shift = _SHIFTS[number % len(_SHIFTS)] if len(row) == 1 else 0
            x = _MARGIN + step * (idx + 0.5) + shift
            places[name] = (x, _MARGIN + number * _ROW, 9.0 * len(name) + 28)
    height = 2 * _MARGIN + (len(rows) - 1) * _ROW + _BOX
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="15">',
        "<title>The floors of eventloop: each box imports from lower ones alone</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        *(_line(places[one], places[other]) for one, other in drawn(graph)),
        *(_drawn_box(name, *places[name]) for name in places),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _line(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    (x, y, _), (to_x, to_y, _) = start, end
    y += _BOX
    bend = max(24.0, (to_y - y) * 0.45)
    return (
        f'<path d="M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f} '
        f'{to_x:.0f},{to_y:.0f}" fill="none" stroke="#9aa7b8" stroke-width="1.3"/>'
    )


def _drawn_box(name: str, x: float, y: float, width: float) -> str:
    is_folder = (PACKAGE / name).is_dir()
    fill = "#dbeafe" if is_folder else "#f1f5f9"
    label = f"{name}/" if is_folder else name
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" height="{_BOX}" rx="6" '
        f'fill="{fill}" stroke="#475569"/>'
        f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle" fill="#0f172a">{escape(label)}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
