"""The state of a run's objects that isn't in their `state_dict`: counters, generators, buffers."""

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
    """Tracks the attributes of model, loss, optimizers, schedulers, metrics and eval data loaders.

    Values that other parts of the checkpoint have are left out: parameters, persistent buffers, and
    states of optimizers and metrics. The train data loader saves its own position and objects.

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
                # A scheduler's state_dict has everything except the functions of a LambdaLR.
                roots[f"schedulers.{interval}[{idx}]"] = getattr(scheduler, "lr_lambdas", None)
        for dataset, metrics in state.metrics.items():
            roots |= {f"metrics.{dataset}.{name}": metric for name, metric in metrics.items()}
        roots |= {
            f"eval_dataloaders.{name}": loader for name, loader in state.eval_dataloaders.items()
        }
        # Any other task is an object with hooks, a plugin, which saves its own state.
        if type(self._task).__module__.startswith("eventloop.task."):
            roots["task"] = self._task
        self._objects = TrackedObjects(
            roots,
            # Excluded: a model's hooks may be methods of plugins, which save their own states.
            excluded=[*_parts_of_train_data(state), *state.plugins.values(), state, self._task],
            weights=lambda: _weights_of(state),
            device=state.device,
        )

    def state_dict(self, *, is_loader_assigned: bool = False) -> dict[str, Any]:
        """Returns the values that have changed since the objects were built.

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
        """Warns about objects that a rank's part of a checkpoint lacks, once for each path.

        Includes objects of the train data loader.
        """
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
        """Restores the result of `state_dict`."""
        assert self._objects is not None
        self._objects.load_state_dict(saved)


def listed_losses(lost: Mapping[str, str]) -> str:
    """Returns the paths of lost objects with the reasons, as text for a message."""
    return first_of([f"{path} ({reason})" for path, reason in lost.items()])


def losses_in_rank(part: Mapping[str, Any]) -> dict[str, str]:
    """Returns the reasons for the objects that a rank's part lacks, by path from the State."""
    losses: dict[str, str] = {}
    for name, entry in part.items():
        for path, reason in losses_in(entry).items():
            if name == "feed":
                path = f"train_dataloader.{path.removeprefix('dataloader.')}"
            losses[path] = reason
    return losses


def losses_in(part: Any) -> dict[str, str]:
    """Returns the reasons for the objects that a part of a checkpoint lacks, by path.

    They are noted by `TrackedObjects.state_dict`, at any depth of the part.
    """
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
    for rank_losses in state.all_gather(losses_in_rank(part)):
        losses |= rank_losses
    if losses and not is_allowed:
        raise ResumeError(
            f"the checkpoint lacks {listed_losses(losses)}, so the run wouldn't continue unchanged",
            fix="begin a new run in another run_dir, or continue without it: "
            + allowing("lost_objects"),
        )


def _parts_of_train_data(state: State) -> Iterator[Any]:
    """Yields the objects that the position in the train data saves: loaders, samplers, data sets."""
    yield state.train_dataloader
    for innermost_loader in loader_of(state.train_dataloader).innermost():
        loader = innermost_loader.dataloader
        yield loader
        for name in ("dataset", "sampler", "batch_sampler"):
            component = getattr(loader, name, None)
            if component is not None:
                yield from samplers_of(component) if name.endswith("sampler") else [component]


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
