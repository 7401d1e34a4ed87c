"""Locates a thread: in which hook, of which plugin, on which line.

It reads the thread's frames on request, so the loop records nothing.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.hook_errors import implementations_of

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(torch.__file__).parent / "distributed")
_PYTHON = str(Path(os.__file__).parent)


def line_of_thread(ident: int) -> str:
    """Returns where the thread with this `threading.get_ident()` is now."""
    return _line(_frames_of(ident))


def line_of_error(error: BaseException) -> str:
    """Returns where an exception was raised."""
    return _line([*traceback.walk_tb(error.__traceback__)][::-1])


def wait_for(work: Any) -> None:
    """Waits for an asynchronous collective, in a frame that `waits_in_collective` knows."""
    work.wait()


def waits_in_collective(ident: int) -> bool:
    """Returns whether a thread is in a function of `torch.distributed`, or in `wait_for`."""
    within = itertools.takewhile(lambda one: not _is_telling(one[0]), _frames_of(ident))
    codes = [frame.f_code for frame, _ in within]
    return any(one is _WAIT or one.co_filename.startswith(_COLLECTIVES) for one in codes)


def held_up_in_finally(ident: int) -> BaseException | None:
    """Returns the exception that a thread holds while a `finally` block waits in a collective.

    An `except` block that waits doesn't count: it may handle the exception, as on other ranks.
    """
    # Private as `sys._current_frames` is; a tuple until Python 3.12.
    found = sys._current_exceptions().get(ident)
    error = found[1] if isinstance(found, tuple) else found
    frames = _frames_of(ident)
    if error is None or not waits_in_collective(ident):
        return None
    passed = {frame for frame, _ in traceback.walk_tb(error.__traceback__)}
    is_held = any(one in passed and _is_in_finally(one, line) for one, line in frames)
    return error if is_held else None


_WAIT = wait_for.__code__


def _is_in_finally(frame: FrameType, line: int) -> bool:
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:  # a file that has changed, say
        return False
    bodies = [one.finalbody for one in ast.walk(tree) if isinstance(one, ast.Try) and one.finalbody]
    return any(body[0].lineno <= line <= (body[-1].end_lineno or line) for body in bodies)


def _line(frames: list[tuple[FrameType, int]]) -> str:
    """Returns the innermost hook, if any, and the innermost line outside of torch and Python."""
    if not frames:
        return "nowhere"
    hook = next((found for frame, _ in frames if (found := _hook_of(frame))), "")
    innermost, line = next((one for one in frames if _is_telling(one[0])), frames[0])
    at = f"{_short(innermost.f_code.co_filename)}:{line}"
    return f"{hook}, at {at}" if hook else f"between hooks, at {at}"


def _hook_of(frame: FrameType) -> str:
    """Names the hook that a frame belongs to, and whose implementation it is."""
    code = frame.f_code
    if code.co_name in HOOKS and code.co_filename.startswith(_PACKAGE):
        return f"in {code.co_name}"
    if not (found := implementations_of(frame)):
        return ""
    hooks = " or ".join(dict.fromkeys(one.hook.name for one in found))
    plugins = " or ".join(dict.fromkeys(f"{one.plugin.role} {one.plugin.origin}" for one in found))
    return f"in {hooks} of {plugins}"


def _is_telling(frame: FrameType) -> bool:
    """Returns whether a frame is neither torch's nor Python's, where all waits look alike."""
    filename = frame.f_code.co_filename
    is_python_s = filename.startswith((_PYTHON, "<frozen")) and "site-packages" not in filename
    return not (is_python_s or filename.startswith(_TORCH) or frame.f_code is _WAIT)


def _frames_of(ident: int) -> list[tuple[FrameType, int]]:
    """Returns the frames of a thread with their lines, the innermost first."""
    frame = sys._current_frames().get(ident)
    return [] if frame is None else list(traceback.walk_stack(frame))


def _short(filename: str) -> str:
    """Shortens a path: eventloop's from the package on, others to folder and file."""
    if filename.startswith(_PACKAGE):
        return Path(filename).relative_to(Path(_PACKAGE).parent).as_posix()
    return "/".join(Path(filename).parts[-2:])
