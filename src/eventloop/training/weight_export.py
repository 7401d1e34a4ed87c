"""The export of weights: refused where they aren't finite, written as a file of safetensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eventloop.errors import EventloopError, NonFiniteError
from eventloop.files.run_folder import why_no_file
from eventloop.training.tensor_slices import held
from eventloop.training.weight_watch import first_not_finite, trained_names

if TYPE_CHECKING:
    from eventloop.state import State


def require_finite(state: State, weights: Mapping[str, Tensor]) -> None:
    """Refuses to export what isn't finite; collective: every rank must call it.

    Raises:
        NonFiniteError: a parameter isn't, unless `on_bad_loss` is "ignore"; then it is warned of.
    """
    mine = first_not_finite(held(weights), trained_names(state.model))
    name = next((one for one in state.all_gather(mine) if one is not None), None)
    if name is None:
        return
    error = NonFiniteError(
        f"the weights aren't exported: {name!r} isn't finite",
        fix="export an earlier checkpoint, `eventloop export CHECKPOINT FILE.safetensors`; with "
        'on_bad_loss="ignore" they are written all the same',
    )
    if state.settings.on_bad_loss == "raise":
        raise error
    if state.rank == 0:
        warnings.warn(f"the exported weights aren't finite: {name!r} is the first", stacklevel=2)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Writes tensors by name to a file of safetensors; raises EventloopError; returns its path."""
    if not (reason := why_no_file(path)):
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
