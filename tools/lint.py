"""Checks rules of this project that no other linter knows; `tox -e lint` runs it.

    python tools/lint.py [PATH ...]         default: the sources and what documents them

- Words: docstrings, comments, messages and Markdown avoid phrases that a native speaker wouldn't
  write.
- Names: no two files of a source folder share a name; `__init__.py` and subcommands may.
- Budget: `src` has no more lines of Python than `MOST_LINES`.

Prints a line for each finding, with what to write instead; the exit status is 1 if there are any.
"""

from __future__ import annotations

import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Of `src`. A commit that removes lines lowers it; what adds some pays for them in the same commit.
MOST_LINES = 36_567
# Searched for in strings and comments, each with what to write instead.
_WORDS = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"^[rf]*\"\"\"Gives (?!up\b|way\b)", "Returns ..., Yields ..., or what the thing is"),
        (r"\bTells whether\b", "Returns whether ..., or Whether ..."),
        (r"\bTells (that|of)\b", "Called when ..., Called after ..."),
        (
            r"\b([Nn]obody|[Ww]hoever|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b",
            "the thing: no plugin, the caller, the rank",
        ),
        (r"\b[Mm]end(s|ed|ing)?\b", "fix"),
        (
            r"(?<!here )(?<!hich )\b(is|are) no (?!longer\b|more\b|better than\b|other\b|way\b|need\b)[a-zA-Z]",
            "is not a ..., isn't ...",
        ),
        (r"\bwhich wait\b", "collective: every rank must call it"),
        (r"\bis a yes\b", "also enables it"),
        (r"\b(it|that|they|which) shall\b", "should, must, or the plain verb"),
    )
)
_KINDS = ("*.py", "*.md")
_TOKENS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def words(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields the line number, the phrase and what to write instead, for each finding."""
    for start, text in _prose(path):
        for idx, line in enumerate(text.split("\n")):
            for pattern, instead in _WORDS:
                for found in pattern.finditer(line):
                    yield start + idx, found[0].strip(), instead


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _TOKENS:
            yield token.start[0], token.string


def names(folder: Path) -> Iterator[str]:
    """Yields a line for each name that two files of a source folder share."""
    by_name = collections.defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        is_subcommand = path.parent.parent.name == "cli"
        if path.name != "__init__.py" and not is_subcommand:
            by_name[path.name].append(path.relative_to(folder).as_posix())
    for name, paths in by_name.items():
        if len(paths) > 1:
            yield f"{folder}: {', '.join(paths)} share the name {name}; rename all but one"


def budget(folder: Path, most: int) -> Iterator[str]:
    """Yields a line if the Python files of a folder have more lines than the budget."""
    lines = sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.py"))
    if lines > most:
        yield f"{folder}: {lines:,} lines, the budget is {most:,}; remove as many as were added"


def main(arguments: list[str]) -> int:
    """Prints the findings; returns the exit status."""
    paths = [Path(one) for one in arguments] or [
        ROOT / "src",
        *ROOT.glob("plugins/*/src"),
        ROOT / "docs",
        *ROOT.glob("*.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
    folders = [one for one in paths if one.is_dir()]
    files = [one for one in paths if not one.is_dir()]
    files += [file for folder in folders for kind in _KINDS for file in folder.rglob(kind)]
    found = [
        f"{file}:{line}: {phrase!r}; write: {instead}"
        for file in sorted(files)
        for line, phrase, instead in words(file)
    ]
    found += [line for folder in folders for line in names(folder)]
    found += budget(ROOT / "src", MOST_LINES)
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
