"""What a callback of Composer's sees under its own trainer and under ours: the same, in one order."""

from __future__ import annotations

from collections.abc import Mapping

import composer
import pytest
from composer.core import Callback, Evaluator
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingScheduler, MultiStepScheduler
from composer_cases import Case, ours, tensors, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


def linear():
    """A model that draws nothing: what an evaluation draws under Composer's trainer changes nothing."""
    return ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), num_classes=10)


def loader(size=8):
    return DataLoader(tensors(), batch_size=size)


def evaluators():
    return [
        Evaluator(label="whole", dataloader=loader()),
        Evaluator(label="part", dataloader=loader(6), subset_num_batches=2),
    ]


def shapes(value):
    if isinstance(value, Tensor):
        return tuple(value.shape) if value.numel() != 1 else float(value)
    if isinstance(value, list | tuple):
        return [shapes(one) for one in value]
    if isinstance(value, Mapping):
        return {name: shapes(one) for name, one in value.items()}
    return type(value).__name__


def counts(timestamp):
    names = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch")
    return tuple(getattr(timestamp, name).value for name in names)


class Recorder(Callback):
    """Writes down the events, and what Composer's State says at each."""

    def __init__(self):
        self.seen = []

    def run_event(self, event, state, logger):
        if event.value.startswith("iteration"):
            return  # we have none
        # In evaluation mode here around all sets, not only around each.
        is_around = (
            event.value in ("init", "eval_before_all", "eval_after_all")
            or "standalone" in event.value
        )
        self.seen.append(
            {
                "event": event.value,
                "timestamp": counts(state.timestamp),
                "eval_timestamp": counts(state.eval_timestamp),
                "predict_timestamp": counts(state.predict_timestamp),
                "loader": (state.dataloader_label, str(state.dataloader_len)),
                "max_duration": str(state.max_duration),
                "training": None if is_around else state.model.training,
                "rates": [group["lr"] for one in state.optimizers for group in one.param_groups],
                "batch": shapes(state.batch),
                "outputs": shapes(state.outputs),
                "loss": shapes(state.loss),
                "metrics": sorted(state.eval_metrics),
                "microbatch": state.device_train_microbatch_size,
            }
        )


def recorded(kind, *, and_then=(), **given):
    recorder, memory = Recorder(), InMemoryLogger()
    values = {"train_dataloader": loader(), "callbacks": [recorder], "loggers": [memory]} | given
    trainer = trainer_of(kind, Case(list, linear), **values)
    trainer.fit()
    if "eval" in and_then:
        trainer.eval()
    if "predict" in and_then:
        trainer.predict(loader())
    trainer.close()
    logged = {
        name: [(str(at.batch), float(value)) for at, value in values]
        for name, values in memory.data.items()
        if "wall" not in name
    }
    return recorder.seen, logged


RUNS = {
    "epochs": dict,
    "evaluation at the end of epochs": lambda: {"eval_dataloader": evaluators()},
    "evaluation every two batches": lambda: {
        "eval_dataloader": evaluators(),
        "eval_interval": "2ba",
    },
    "an end in mid-epoch": lambda: {"max_duration": "5ba", "eval_dataloader": evaluators()},
    "an end in samples": lambda: {"max_duration": "30sp"},
    "microbatches": lambda: {
        "device_train_microbatch_size": 3,
        "eval_dataloader": evaluators(),
        "and_then": ("eval", "predict"),
    },
    "a schedule": lambda: {"schedulers": [CosineAnnealingScheduler()]},
    "a schedule of epochs": lambda: {
        "schedulers": [MultiStepScheduler(["1ep"])],
        "step_schedulers_every_batch": False,
    },
    "a shorter schedule": lambda: {
        "schedulers": [MultiStepScheduler(["2ep"])],
        "max_duration": "4ep",
        "scale_schedule_ratio": 0.5,
    },
    "a part of the data": lambda: {"train_subset_num_batches": 2, "max_duration": "3ep"},
    "one evaluation set": lambda: {"eval_dataloader": loader(), "eval_subset_num_batches": 1},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUNS)
def test_a_callback_sees_the_same_events_with_the_same_state(name):
    """Timestamps, batches, losses, rates and data loaders, at each of them; and the same is logged."""
    (theirs, their_logs), (here, our_logs) = (
        recorded(kind, **RUNS[name]()) for kind in (composer.Trainer, ours)
    )

    assert [one["event"] for one in here] == [one["event"] for one in theirs]
    for one, other in zip(here, theirs, strict=True):
        assert one == other
    assert our_logs == their_logs


def test_a_batch_that_an_event_changes_would_be_seen():
    """Control: the comparison isn't blind."""

    class Halves(Callback):
        def after_dataloader(self, state, logger):
            state.batch = tuple(one[:4] for one in state.batch)

    plain, _ = recorded(ours)
    recorded(ours, callbacks=[Halves(), recorder := Recorder()])

    assert plain != recorder.seen
    assert {tuple(one["batch"][0]) for one in recorder.seen if one["event"] == "batch_start"} == {
        (4, 3, 16, 16)
    }
