"""Runs that are killed in the middle of a batch, and what they leave, for tests that resume them."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eventloop.checkpoint.format import Checkpoint, read, write
from eventloop.hooks import hookimpl

if TYPE_CHECKING:
    from eventloop.state import State

_STATUS = 9


class Dies:
    """An algorithm that ends its process in the middle of a batch, as a kill does: nothing is closed.

    Args:
        batch: how many are done by then; None: never, for the run that is resumed.
    """

    name = "dies"
    free_options = ("batch",)

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Ends the process, when it is time."""
        if state.clock.batch == self.batch:
            os._exit(_STATUS)


def fit_and_die(fit: Callable[..., Any], *args: Any) -> None:
    """Calls a function, in which `Dies` strikes, in a fork of this process.

    Args:
        args: what it is called with.

    Raises:
        AssertionError: it returned or raised; what it raised is printed.
    """
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(*args)
        except BaseException:  # noqa: BLE001  nothing else prints it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != _STATUS:
        raise AssertionError(f"{fit!r} ended with {status}: no process was killed in it")


def last_checkpoint(folder: Path) -> Checkpoint:
    """Reads the newest checkpoint of the run that an `isolated_trainer` has in a folder."""
    return read(max((folder / "run" / "checkpoints").glob("ba*")))


@contextmanager
def edited_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Yields the newest checkpoint, and saves it as edited: to forget something on purpose."""
    checkpoint = last_checkpoint(folder)
    yield checkpoint
    shutil.rmtree(checkpoint.path)
    write(checkpoint.path, checkpoint.parts, checkpoint.facts, batch=checkpoint.batch)
