"""Lint: rules of this project that no other linter knows; `tox -e lint` runs it.

    python tools/lint.py [PATH ...]         src and the plugins' sources unless given

- Words: English in docstrings, comments and messages that a native speaker wouldn't write.
- Names: no two files of `src` share a name but `__init__.py` and the subcommands of `cli`.

Each finding is a line with what to write instead; the exit status is 1 if there is one.
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
# What is found in strings and comments, and what to write instead.
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
            r"(?<!here )(?<!hich )\b(is|are) no (?!longer\b|more\b|other\b|way\b|need\b)[a-zA-Z]",
            "is not a ..., isn't ...",
        ),
        (r"\bwhich wait\b", "collective: every rank must call it"),
        (r"\bis a yes\b", "also enables it"),
        (r"\b(it|that|they|which) shall\b", "should, must, or the plain verb"),
    )
)
_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def words(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields line number, words and what to write instead, for each finding in a source."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _PROSE:
            continue
        for idx, line in enumerate(token.string.split("\n")):
            for pattern, instead in _WORDS:
                for found in pattern.finditer(line):
                    yield token.start[0] + idx, found[0].strip(), instead


def names(package: Path) -> Iterator[str]:
    """Yields a line for each name that two files of a package have."""
    by_name = collections.defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if path.name != "__init__.py" and path.parent.parent != package / "cli":
            by_name[path.name].append(path.relative_to(package).as_posix())
    for name, paths in by_name.items():
        if len(paths) > 1:
            yield f"{name} stands for {len(paths)} subjects: {', '.join(paths)}; rename all but one"


def main(arguments: list[str]) -> int:
    """Prints what is found; returns the exit status."""
    paths = [Path(one) for one in arguments] or [ROOT / "src", *ROOT.glob("plugins/*/src")]
    files = [file for one in paths for file in (one.rglob("*.py") if one.is_dir() else [one])]
    found = [
        f"{file}:{line}: {phrase!r}; write: {instead}"
        for file in sorted(files)
        for line, phrase, instead in words(file.read_text(encoding="utf-8"))
    ]
    if not arguments:
        found += names(ROOT / "src" / "eventloop")
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
