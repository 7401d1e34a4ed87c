"""Short tracebacks in notebooks: hides eventloop's frames in IPython, as pytest hides its own."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

import eventloop

_HIDDEN = (
    str(Path(eventloop.__file__).parent) + os.sep,
    inspect.getfile(nn.Module),  # adds two frames between a model and each of its layers
)
_MARK = "__tracebackhide__"


@contextmanager
def short_in_notebooks() -> Iterator[None]:
    """Hides the frames of eventloop in the traceback of an exception that leaves the block."""
    try:
        yield
    except BaseException as error:
        hide_frames(error)
        raise


def hide_frames(error: BaseException) -> None:
    """Marks frames of eventloop, and torch's calls of modules, so that IPython doesn't show them.

    Has no effect outside of IPython. The frame that raised is always shown, and so are frames of the
    task, plugins and other packages.
    """
    if not _is_in_ipython():
        return
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(_HIDDEN):
            # `f_locals` also keeps names that aren't variables of the function (Python 3.11 to 3.14).
            frame.f_locals[_MARK] = True


def _is_in_ipython() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None
