"""Properties of a run that a main callback can't handle, found before the run."""

from __future__ import annotations

from collections.abc import Iterator

from eventloop import State
from eventloop_orca.points import Points


def problems_with_main(state: State, points: Points) -> Iterator[str]:
    """Yields the features of a run that its main callback would skip or handle wrongly."""
    has_forward = points.overrides("on_iter_forward") or points.overrides("on_train_forward")
    if not has_forward and state.criterion is None:
        yield "the task gives no loss for the default on_iter_forward, Task(loss=...)"
    if points.overrides("on_lr_adjust") and state.schedulers.get("ba"):
        yield (
            "its on_lr_adjust moves the scheduler once an epoch, but the task's is counted in "
            'batches; give Task(scheduler_interval="ep")'
        )
    if points.overrides("on_iter_backward"):
        yield from _problems_with_steps(state)


def _problems_with_steps(state: State) -> Iterator[str]:
    """Yields further problems if the callback makes the optimizer step itself."""
    settings = state.settings
    instead = "without its on_iter_backward, eventloop makes the step"
    if state.precision.name in ("bf16", "fp16"):
        yield f"its on_iter_backward isn't made for precision {state.precision.name}; {instead}"
    if settings.microbatch_size is not None:
        yield (
            f"its on_iter_backward would make a step for each microbatch of "
            f"microbatch_size={settings.microbatch_size!r}; {instead}"
        )
    for name in ("clip_norm", "clip_value"):
        if getattr(settings, name) is not None:
            yield f"{name} would have no effect on the step of its on_iter_backward; {instead}"
    if len(state.optimizers) > 1:
        names = ", ".join(state.optimizers)
        yield f"its on_iter_backward knows one optimizer, and the run has {names}; {instead}"
