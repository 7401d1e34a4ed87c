"""The state of a run's objects beside what their `state_dict` holds: counters, generators, buffers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.data.loaders import loader_of
from eventloop.data.sampling_state import samplers_of
from eventloop.errors import ResumeError, first_of
from eventloop.fixes import allowing
from eventloop.object_state.tracked import TrackedObjects

if TYPE_CHECKING:
    from eventloop.state import State


class RunObjects:
    """Model, loss, optimizers, schedulers, metrics and eval data loaders as objects.

    What is in checkpoints anyway isn't in this part: parameters, persistent buffers, states of
    optimizers and metrics. The train data loader saves its own position and objects.

    Args:
        task: the task of the run.
    """

    def __init__(self, task: object) -> None:
        self._task = task
        self._objects: TrackedObjects | None = None
        self._warned_paths: set[str] = set()

    def remember(self, state: State) -> None:
        """Remembers the objects as they are built, before anything is loaded."""
        roots: dict[str, Any] = {"model": state.model}
        roots |= {f"optimizers.{name}": optimizer for name, optimizer in state.optimizers.items()}
        for interval, pairs in state.schedulers.items():
            for idx, (_, scheduler) in enumerate(pairs):
                # The functions of a LambdaLR; all else is in the state_dict of a scheduler.
                roots[f"schedulers.{interval}[{idx}]"] = getattr(scheduler, "lr_lambdas", None)
        for dataset, metrics in state.metrics.items():
            roots |= {f"metrics.{dataset}.{name}": metric for name, metric in metrics.items()}
        roots |= {
            f"eval_dataloaders.{name}": loader for name, loader in state.eval_dataloaders.items()
        }
        # A task that is an object with hooks is a plugin, which saves its state by itself.
        if type(self._task).__module__.startswith("eventloop.task."):
            roots["task"] = self._task
        self._objects = TrackedObjects(
            roots,
            # A hook of a model may be a method of a plugin, which saves its state by itself.
            excluded=[*_parts_of_train_data(state), *state.plugins.values(), state, self._task],
            weights=lambda: _weights_of(state),
            device=state.device,
        )

    def state_dict(self, *, is_loader_assigned: bool = False) -> dict[str, Any]:
        """Returns what has changed since the objects were built.

        Args:
            is_loader_assigned: whether a plugin has replaced the train data loader in mid-run.
        """
        assert self._objects is not None
        saved = self._objects.state_dict()
        if is_loader_assigned:
            saved["lost"]["train_dataloader"] = (
                "a plugin has assigned another data loader; return it from build_train_dataloader, "
                "and ask for it with should_rebuild_dataloader"
            )
        return saved

    def warn_of_losses(self, part: Mapping[str, Any]) -> None:
        """Warns of what a rank's part of a checkpoint lacks, once of each path; includes train data."""
        losses = losses_in_rank(part)
        for path in self._warned_paths:
            losses.pop(path, None)
        if losses:
            self._warned_paths |= losses.keys()
            warnings.warn(
                f"checkpoints of this run lack {listed_losses(losses)}. Build such objects with "
                "the task and let the run change values in them, or save their state in state_dict and "
                "load_state_dict of a plugin; a resume without them must be allowed",
                stacklevel=2,
            )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        assert self._objects is not None
        self._objects.load_state_dict(saved)


def listed_losses(lost: Mapping[str, str]) -> str:
    """Returns what checkpoints lack, for a message: paths, each with its reason."""
    return first_of([f"{path} ({reason})" for path, reason in lost.items()])


def losses_in_rank(part: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a rank's part of a checkpoint lacks, by path from the state of the run."""
    losses: dict[str, str] = {}
    for name, entry in part.items():
        for path, reason in losses_in(entry).items():
            if name == "feed":
                path = f"train_dataloader.{path.removeprefix('dataloader.')}"
            losses[path] = reason
    return losses


def losses_in(part: Any) -> dict[str, str]:
    """Returns what a part of a checkpoint lacks, by path, wherever in the part it is noted."""
    if not isinstance(part, Mapping):
        entries = part if isinstance(part, list | tuple) else ()
        return {path: reason for entry in entries for path, reason in losses_in(entry).items()}
    losses: dict[str, str] = {}
    for key, entry in part.items():
        is_note = key == "lost" and "contents" in part
        losses |= entry if is_note else losses_in(entry)
    return losses


def require_nothing_lost(state: State, part: Mapping[str, Any], is_allowed: bool) -> None:
    """Raises ResumeError if a checkpoint lacks objects that the run had changed; collective."""
    losses: dict[str, str] = {}
    for of_rank in state.all_gather(losses_in_rank(part)):
        losses |= of_rank
    if losses and not is_allowed:
        raise ResumeError(
            f"the checkpoint lacks {listed_losses(losses)}, so that the run wouldn't go on as it was",
            fix="begin a new run in another run_dir, or go on without it: "
            + allowing("lost_objects"),
        )


def _parts_of_train_data(state: State) -> Iterator[Any]:
    """Yields what the position in the train data has: the loaders, their samplers and data sets."""
    yield state.train_dataloader
    for part_loader in loader_of(state.train_dataloader).innermost():
        loader = part_loader.dataloader
        yield loader
        for name in ("dataset", "sampler", "batch_sampler"):
            part = getattr(loader, name, None)
            if part is not None:
                yield from samplers_of(part) if name.endswith("sampler") else [part]


def _weights_of(state: State) -> Iterator[Tensor]:
    """Yields the tensors whose values are in other parts of a checkpoint."""
    yield from state.model.parameters()
    for module in state.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            yield from group["params"]
