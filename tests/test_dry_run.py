"""Dry runs: every hook of a run, in two short epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eventloop import hookimpl
from eventloop.dry_run import dry_run


class Called:
    """An observer that gathers the hooks that are called, whoever implements them."""

    def __init__(self) -> None:
        self.hooks: set[str] = set()

    def observed(self, one):
        def plain(*args):
            self.hooks.add(one.hook.name)
            return one.function(*args)

        return one if one.wrapper else replace(one, function=plain)


def test_a_dry_run_calls_every_hook_that_a_run_calls(
    make_trainer, make_task, make_batches, make_recorder, make_plugin, tmp_path
):
    """What breaks after ten hours breaks after ten seconds; `every=` and savers included."""

    class Saver:
        @hookimpl(every="4ba")
        def batch_end(self, state):
            state.request_checkpoint()

        @hookimpl
        def save_checkpoint(self, state):
            saved.append(state.clock.batch)
            return state.run_dir

    saved: list[int] = []
    task = make_task(train_dataloader=make_batches(6), eval_dataloaders=make_batches(3))
    task.scheduler = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
    full, dry, short = Called(), Called(), Called()
    given = {"callbacks": [make_recorder()], "device": "cpu", "autoload": False}
    with make_trainer(task, max_duration="2ep", algorithms=[Saver()], observers=[full],
                      callbacks=[make_recorder()]) as trainer:  # fmt: skip
        trainer.fit()
        trainer.export(tmp_path / "weights.safetensors")
    num_saved = len(saved)
    make_trainer(task, max_duration="1ba", observers=[short], **given).fit()
    result = dry_run(task, algorithms=[Saver()], observers=[dry], max_duration="9ep", **given)

    assert full.hooks - dry.hooks == set()
    assert full.hooks - short.hooks != set()  # the comparison can fail
    assert {"close", "fit_end", "save_checkpoint", "export", "eval_end", "log"} <= dry.hooks
    assert len(saved) > num_saved
    assert not result.run_dir.exists()


def test_a_dry_run_tells_of_a_plugin_that_breaks_late(make_task, make_plugin, clean):
    """An event of the end, and a hook that runs once in a thousand batches."""

    class Late:
        @hookimpl(every="1000ba")
        def batch_end(self, state):
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        dry_run(make_task(), callbacks=[Late()], device="cpu", autoload=False)
