"""Files that a run writes: whether they can be, and tensors in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.errors import EventloopError

if TYPE_CHECKING:
    from torch import Tensor


def why_no_folder(path: Path) -> str:
    """Returns why files can't be written into a folder of this name, or ""; makes nothing."""
    path = path.expanduser().absolute()
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # it is too long, or has a zero byte
        return getattr(error, "strerror", None) or str(error)
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"nothing may be written in {there}"
    return ""


def why_no_file(path: Path) -> str:
    """Returns why no file can be written at this path, or ""; makes nothing."""
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return "it may not be overwritten"
    return why_no_folder(path.parent)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Writes tensors by name to a safetensors file and gives its path; makes its folder.

    Raises:
        EventloopError: it can't be written.
    """
    from safetensors import SafetensorError  # with torch, which the other functions do without
    from safetensors.torch import save_file

    reason = why_no_file(path)
    if not reason:
        copies = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(copies, path)
        except (OSError, SafetensorError) as error:
            reason = str(error)
    if reason:
        raise EventloopError(
            f"the tensors can't be written to {str(path)!r}: {reason}",
            fix="give another file, `model.safetensors`, say, or free space",
        )
    return path
