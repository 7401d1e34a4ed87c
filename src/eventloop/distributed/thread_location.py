"""Locates a thread: in which hook, of which plugin, on which line.

It reads the thread's frames on request, so that the loop needn't record its position.
"""

from __future__ import annotations

import ast
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
    """Returns the current position of a thread, given by its `threading.get_ident()`."""
    return _line(_frames_of(ident))


def line_of_error(error: BaseException) -> str:
    """Returns the position at which an exception was raised."""
    return _line([*traceback.walk_tb(error.__traceback__)][::-1])


def wait_for(work: Any) -> None:
    """Waits for an asynchronous collective, in a frame that `waits_in_collective` recognizes.

    The wait itself happens in C++, without a frame: the caller's frame would be the innermost.
    """
    work.wait()


def waits_in_collective(ident: int) -> bool:
    """Returns whether a thread is in a function of `torch.distributed`, or in `wait_for`."""
    for frame, _ in _frames_of(ident):
        if _is_telling(frame):
            return False
        if frame.f_code is _WAIT or frame.f_code.co_filename.startswith(_COLLECTIVES):
            return True
    return False


def held_up_in_finally(ident: int) -> BaseException | None:
    """Returns the exception that a thread holds while a `finally` block waits in a collective.

    An `except` block that waits doesn't count: it may be handling an exception that all ranks raised.
    """
    # As private as `sys._current_frames`. The values are tuples until Python 3.11.
    exception = sys._current_exceptions().get(ident)
    error = exception[1] if isinstance(exception, tuple) else exception
    frames = _frames_of(ident)
    if error is None or not waits_in_collective(ident):
        return None
    traceback_frames = {frame for frame, _ in traceback.walk_tb(error.__traceback__)}
    is_held = any(
        frame in traceback_frames and _is_in_finally(frame, line) for frame, line in frames
    )
    return error if is_held else None


_WAIT = wait_for.__code__


def _is_in_finally(frame: FrameType, line: int) -> bool:
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:  # such as of a file that was edited during the run
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.finalbody:
            last_line = node.finalbody[-1].end_lineno or line
            if node.finalbody[0].lineno <= line <= last_line:
                return True
    return False


def _line(frames: list[tuple[FrameType, int]]) -> str:
    """Returns the innermost hook, if any, and the innermost line outside of torch and Python."""
    if not frames:
        return "nowhere"
    hooks = (_hook_of(frame) for frame, _ in frames)
    hook = next(filter(None, hooks), "between hooks")
    telling_frames = (pair for pair in frames if _is_telling(pair[0]))
    innermost, line = next(telling_frames, frames[0])
    return f"{hook}, at {_short(innermost.f_code.co_filename)}:{line}"


def _hook_of(frame: FrameType) -> str:
    """Returns the hook that a frame implements, and its plugin; "" for other frames."""
    code = frame.f_code
    if code.co_name in HOOKS and code.co_filename.startswith(_PACKAGE):
        return f"in {code.co_name}"
    implementations = implementations_of(frame)
    if not implementations:
        return ""
    # A function can implement several hooks; dicts remove duplicates and keep the order.
    hooks: dict[str, None] = {}
    plugins: dict[str, None] = {}
    for implementation in implementations:
        hooks[implementation.hook.name] = None
        plugins[f"{implementation.plugin.role} {implementation.plugin.origin}"] = None
    return f"in {' or '.join(hooks)} of {' or '.join(plugins)}"


def _is_telling(frame: FrameType) -> bool:
    """Whether a frame is neither torch's nor Python's: a wait in those looks the same everywhere."""
    filename = frame.f_code.co_filename
    is_of_python = filename.startswith((_PYTHON, "<frozen")) and "site-packages" not in filename
    return not (is_of_python or filename.startswith(_TORCH) or frame.f_code is _WAIT)


def _frames_of(ident: int) -> list[tuple[FrameType, int]]:
    """Returns the frames of a thread with their line numbers, innermost first."""
    frame = sys._current_frames().get(ident)
    return [] if frame is None else list(traceback.walk_stack(frame))


def _short(filename: str) -> str:
    """Shortens a path: of eventloop, to the part from the package on; of others, to folder and file."""
    if filename.startswith(_PACKAGE):
        return Path(filename).relative_to(Path(_PACKAGE).parent).as_posix()
    return "/".join(Path(filename).parts[-2:])
