"""Files that commands write: refused before anything is done, where they can't be."""

from __future__ import annotations

import shlex
from pathlib import Path

from eventloop.errors import UsageError
from eventloop.files.outputs import why_no_file

SUFFIX = ".safetensors"


def require_writable(path: Path, option: str = "", suffix: str = SUFFIX) -> None:
    """Refuses a path where no such file can be written.

    Args:
        option: what stands before it on the command line: "--export ".
        suffix: what its name must end with.

    Raises:
        UsageError: its folder doesn't exist, or its name doesn't say what it will hold.
    """

    def written(path: Path) -> str:
        return f"write `{option}{shlex.quote(str(path))}`"

    if path.suffix != suffix:
        name = option.strip(" -")
        what = "weights and outputs are" if suffix == SUFFIX else f"the {name} is"
        raise UsageError(
            f"{option}{path}: {what} written as {suffix}", fix=written(path.with_suffix(suffix))
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{option}{path}: there is no folder {str(path.parent)!r}",
            fix=f"make it with `mkdir -p {shlex.quote(str(path.parent))}`",
        )
    if reason := why_no_file(path):
        raise UsageError(
            f"{option}{path}: it can't be written: {reason}",
            fix=f"give another file: `{option}other{SUFFIX}`",
        )
