"""The rows of an ablation: choices of algorithms, each off in turn or as listed in a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventloop.commands import Job, UsageError, flag, fold
from eventloop_experiments.runs import read_texts

NONE = "none"
ALL = "all"
_NAME = re.compile(r"\w[\w .=-]*")  # also valid as the name of a folder
_FIX = "write a line `mixup: {-p: mixup, task.lr: 0.1}` for each row"


@dataclass(frozen=True)
class Variant:
    """A choice of algorithms, and of options if a file sets them.

    Args:
        name: "none", "all", "without ema"; for a single algorithm, its name.
        algorithms: names of the algorithms that are on.
        options: options of this variant only, with values as typed.
    """

    name: str
    algorithms: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> str:
        """The name of its folder, in lower case: some file systems ignore case."""
        return self.name.replace(" ", "-").lower()


def variants_of(names: tuple[str, ...]) -> tuple[Variant, ...]:
    """Returns the variants of some algorithms, in the order of the table's rows."""
    none = Variant(NONE, ())
    if len(names) == 1:
        return (none, Variant(names[0], names))
    without = (
        Variant(f"without {name}", tuple(algorithm for algorithm in names if algorithm != name))
        for name in names
    )
    return (none, Variant(ALL, names), *without)


def read_variants(path: Path) -> tuple[Variant, ...]:
    """Reads rows from a YAML file; the first row is "none", which may have options but no algorithms.

    Raises:
        UsageError: the file can't be read, or a row is invalid.
    """
    rows = [
        _variant(path, name, content)
        for name, content in read_texts(path, "--variants", _FIX).items()
    ]
    none = next((row for row in rows if row.name == NONE), Variant(NONE, ()))
    if none.algorithms:
        raise UsageError(
            f"--variants {path}: the row {NONE!r} has algorithms, {', '.join(none.algorithms)}",
            fix="rename the row; to keep an algorithm in all runs, use `--keep NAME`",
        )
    compared_rows = [row for row in rows if row is not none]
    if len({row.place for row in rows}) < len(rows):
        raise UsageError(
            f"--variants {path}: two rows would have one folder", fix="give them other names"
        )
    if not compared_rows:
        raise UsageError(f"--variants {path} has no row to compare with {NONE!r}", fix=_FIX)
    return (none, *compared_rows)


def check_variants(variants: Sequence[Variant], algorithms: Sequence[str], job: Job) -> None:
    """Validates the rows of a file before anything is trained.

    Args:
        algorithms: names of all ablated algorithms.

    Raises:
        UsageError, SettingError: an algorithm is in no row, or an option isn't known, isn't of its
            type, or would have no effect.
    """
    in_rows = {fold(name) for variant in variants for name in variant.algorithms}
    for name in algorithms:
        if fold(name) not in in_rows:
            raise UsageError(
                f"the algorithm {name!r} is in no row of --variants",
                fix=f"name it in one, or leave `-p {name}` out; `--keep {name}` takes it into all",
            )
    for variant in variants:
        off = set(map(fold, algorithms)) - set(map(fold, variant.algorithms))
        for key, text in variant.options:
            section, _, option = key.rpartition(".")
            if fold(section) in off:
                raise UsageError(
                    f"the row {variant.name!r} has {flag(option, section)}, but not {section!r}",
                    fix=f"add `-p: {section}` to the row, or leave the option out",
                )
            job.convert(key, text)


def _variant(path: Path, name: str, content: Any) -> Variant:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--variants {path}: {name!r} can't be the name of a row",
            fix="take letters, digits, spaces and any of `.`, `=`, `-`",
        )
    if content == "":  # `none:` without a value
        content = {}
    if not isinstance(content, dict):
        raise UsageError(f"--variants {path}: {name}: {content!r} is not a mapping", fix=_FIX)
    algorithms = content.pop("-p", [])
    if isinstance(algorithms, str):
        algorithms = [algorithm.strip() for algorithm in algorithms.split(",")]
    for key, value in content.items():
        if not isinstance(value, str):
            raise UsageError(
                f"--variants {path}: {name}: {key} is not a text or a number",
                fix="put it in quotes, as on the command line: `'[0.9, 0.95]'`",
            )
    return Variant(name, tuple(algorithms), tuple(content.items()))
