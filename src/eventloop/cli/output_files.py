"""Checks before the work that the output files of a command can be written."""

from __future__ import annotations

import shlex
from pathlib import Path

from eventloop.cli.arguments import Arguments
from eventloop.config.option_types import flag
from eventloop.errors import UsageError
from eventloop.files.run_folder import why_no_file

SUFFIX = ".safetensors"


def output_path(arguments: Arguments, name: str, suffix: str = SUFFIX) -> Path | None:
    """Returns the path of the output file, if it can be written.

    Raises:
        UsageError: the file can't be written, or has the wrong suffix.
    """
    if (path := arguments.path(name)) is not None:
        require_writable(path, name, suffix)
    return path


def require_writable(path: Path, name: str = "", suffix: str = SUFFIX) -> None:
    """Checks that an output file can be written.

    Args:
        path: the output file.
        name: the name of its option; "" for a positional argument.
        suffix: the required suffix.

    Raises:
        UsageError: the path is empty, its folder doesn't exist, or it has the wrong suffix.
    """
    option = f"{flag(name)} " if name else ""

    def line_to_write(path: Path) -> str:
        return f"write `{option}{shlex.quote(str(path))}`"

    if not path.name:
        raise UsageError(f"{option}'' names no file", fix=line_to_write(Path(f"other{suffix}")))
    if path.suffix != suffix:
        subject = "weights and outputs are" if suffix == SUFFIX else f"the {name} is"
        fix = line_to_write(path.with_suffix(suffix))
        if name == "export" and not path.suffix:
            fix += f", or `{option}{shlex.quote(str(path))}/` with a plugin that writes a folder, such as export"
        raise UsageError(f"{option}{path}: {subject} written as {suffix}", fix=fix)
    if not path.parent.is_dir():
        raise UsageError(
            f"{option}{path}: there is no folder {str(path.parent)!r}",
            fix=f"make it with `mkdir -p {shlex.quote(str(path.parent))}`",
        )
    if reason := why_no_file(path):
        raise UsageError(
            f"{option}{path}: it can't be written: {reason}",
            fix=line_to_write(Path(f"other{suffix}")),
        )
