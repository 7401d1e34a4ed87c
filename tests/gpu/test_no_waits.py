"""The host never waits for the device in a steady step, in any precision, whatever is on."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from rich.console import Console
from torchmetrics.classification import MulticlassAccuracy

from eventloop import hookimpl
from eventloop_check import HostReads
from eventloop_ema import Ema
from eventloop_jsonl import Jsonl
from eventloop_progress import Progress

NUM_STEPS = 30
WARM_UP = 5  # kernels are chosen, memory is taken, momenta are made


class Guard:
    """An algorithm under which it raises to wait for a GPU, and is counted to read on the CPU.

    From `after_dataloader` to `batch_checkpoint`, once the run is steady; with `throughout` until
    the epoch's end, between batches too.
    """

    name = "a-guard"  # before the others, so that it encloses all of them

    def __init__(self, device, *, throughout=False):
        self.on_gpu = device.type == "cuda"
        self.throughout = throughout
        self.num_reads = self.num_windows = 0
        self.is_open = False
        self.reads = HostReads(self.seen)

    def seen(self, tensor, how):
        self.num_reads += 1

    def switch(self, is_open):
        if self.is_open == is_open:
            return
        self.is_open = is_open
        self.num_windows += is_open
        if self.on_gpu:
            set_sync_debug_mode("error" if is_open else "default")
        elif is_open:
            self.reads.__enter__()
        else:
            self.reads.__exit__(None, None, None)

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state):
        self.switch(state.clock.batch >= WARM_UP)

    @hookimpl(tryfirst=True)
    def batch_checkpoint(self, state):
        if not self.throughout:
            self.switch(False)

    @hookimpl(tryfirst=True)
    def epoch_end(self, state):
        self.switch(False)  # the last line of an epoch has its mean loss

    @hookimpl(tryfirst=True)
    def exception(self, state, error):
        self.switch(False)


def set_sync_debug_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture(autouse=True)
def waits_again():
    """Whatever a test did, later ones may wait."""
    yield
    if torch.cuda.is_available():
        set_sync_debug_mode("default")


@pytest.fixture
def guarded(make_run, make_images):
    """Trains 30 steps with microbatches, clipping, a scheduler, metrics and loggers."""

    def guarded(mode, guard, *plugins, task=None, **settings):
        progress = Progress(refresh_per_s=1e9)
        progress.console = Console(file=io.StringIO(), force_terminal=True)
        values = {
            "train_dataloader": make_images(NUM_STEPS),
            "optimizer": lambda model: torch.optim.SGD(
                model.parameters(), lr=0.1, momentum=0.9, fused=True
            ),
            "scheduler": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, NUM_STEPS),
            # A macro average counts by torch.bincount, which waits for the device.
            "train_metrics": {"accuracy": MulticlassAccuracy(10, average="micro",
                                                             validate_args=False)},
        }  # fmt: skip
        settings = {
            "precision": mode.precision,
            "on_bad_loss": "raise",
            "microbatch_size": 8,
            "clip_norm": 0.5,
            "clip_value": 0.1,
        } | settings
        make_run(
            mode.device, values | (task or {}),
            algorithms=[guard, *plugins], callbacks=[progress, Jsonl()], **settings,
        ).fit()  # fmt: skip
        return guard

    return guarded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("log_interval", ["1ba", "10ba"])
def test_a_steady_step_waits_for_nothing(mode, log_interval, guarded):
    """In fp16 for one event alone, whether the step before was made: the documented wait."""
    guard = guarded(mode, Guard(mode.device), log_interval=log_interval)

    assert guard.num_windows == NUM_STEPS - WARM_UP
    assert guard.num_reads <= (guard.num_windows if mode.precision == "fp16" else 0)


@pytest.mark.nightly
def test_200_steps_with_averaged_weights_wait_for_nothing(
    accelerator, guarded, mode_of, make_images
):
    """What most runs have: bf16, clipping, a schedule, a metric, an average of the weights, JSON Lines."""
    guard = guarded(mode_of(accelerator, "bf16"), Guard(accelerator), Ema(), microbatch_size=None,
                    clip_value=None, task={"train_dataloader": make_images(WARM_UP + 200)})  # fmt: skip

    assert guard.num_windows == 200
    assert guard.num_reads == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["sgd-foreach", "adamw-fused", "adamw-foreach"])
def test_no_optimizer_of_a_gpu_waits(optimizer, accelerator, guarded, mode_of):
    """Those that aren't fused neither; AdamW's counter of steps stays on the host then."""
    kind, how = optimizer.split("-")
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    task = {"optimizer": lambda model: make(model.parameters(), lr=0.01, **{how: True})}

    guard = guarded(mode_of(accelerator), Guard(accelerator), task=task)

    assert guard.num_windows == NUM_STEPS - WARM_UP


@pytest.mark.parametrize("pin_memory", [False, True])
def test_nothing_waits_between_steps_either(pin_memory, accelerator, guarded, mode_of, make_images):
    """Batches come and numbers go while the device computes, from the first steady step to the epoch's end."""
    batches = make_images(NUM_STEPS)
    if pin_memory:
        batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]

    guard = guarded(mode_of(accelerator), Guard(accelerator, throughout=True),
                    task={"train_dataloader": batches}, log_interval="1ba")  # fmt: skip

    assert guard.num_windows == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("hook", ["after_dataloader", "after_loss", "batch_end"])
def test_a_plugin_that_waits_is_found(hook, device, guarded, make_plugin, mode_of):
    """Control: on the GPU it raises, on the CPU it is counted."""

    def read(state):
        state.model[0].weight.sum().item()

    reader = make_plugin("z", **{hook: read})
    guard = Guard(device)

    if device.type == "cuda":
        with pytest.raises(RuntimeError, match="synchronizing"):
            guarded(mode_of(device), guard, reader, microbatch_size=None)
    else:
        guarded(mode_of(device), guard, reader, microbatch_size=None)

        assert guard.num_reads == NUM_STEPS - WARM_UP
