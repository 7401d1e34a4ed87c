"""Command-line parsing that several commands share: the path of a plot, YAML files, reserved flags."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from eventloop.commands import Arguments, UsageError, flag, output_path


def plot_path(
    arguments: Arguments, package: str, needs: Iterable[str] = ("matplotlib",)
) -> Path | None:
    """Returns the path of `--plot`, checked before training starts; None without `--plot`.

    Args:
        package: package whose extra `plot` installs the modules.
        needs: modules needed to draw the plot.

    Raises:
        UsageError: the file can't be written, or a module isn't installed.
    """
    path = output_path(arguments, "plot", ".png")
    for name in needs if path is not None else ():
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--plot needs {name}, which isn't installed",
                fix=f'`pip install "{package}[plot]"`, or leave --plot out',
            )
    return path


def read_texts(path: Path, option: str, fix: str) -> dict[str, Any]:
    """Reads a YAML file that is a mapping; all scalars stay strings, as on a command line.

    Raises:
        UsageError: the file can't be read, or isn't a mapping.
    """
    try:
        # YAML 1.1 would read 16:32 as a time of day.
        content = yaml.BaseLoader(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"{option} {path} can't be read: {reason}", fix=fix) from error
    if not isinstance(content, dict):
        raise UsageError(f"{option} {path} is not a mapping", fix=fix)
    return content


def refuse_own(
    arguments: Arguments, names: Iterable[str], reason: str = "has no effect here"
) -> None:
    """Raises UsageError if one of these settings is given as a flag: the command sets them itself."""
    for name in names:
        if name in arguments.flags:
            raise UsageError(f"{flag(name)} {reason}", fix=f"leave {flag(name)} out")
