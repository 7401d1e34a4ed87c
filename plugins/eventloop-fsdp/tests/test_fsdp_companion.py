"""A companion is sharded like the model, and computes what it computes in one process."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import EventloopError, Task, hookimpl
from eventloop.toolbox import local
from eventloop_distill import Distill
from eventloop_ema import Ema
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.argmax(1))


def layers(seed=None, width=8):
    if seed is not None:
        torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(3, width), *blocks, nn.Linear(width, 3))


class Ends:
    """Ends a run before a batch, on all ranks."""

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch=None):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def fit(folder, *plugins, batch_size=8, seed=5, batch=None, **given):
    """Trains two epochs with a teacher; gives the weights, and what the teacher is made of."""
    task = Task(
        model=layers,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(DATA, batch_size),
        eval_dataloaders=lambda: DataLoader(DATA, batch_size),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    distill = Distill(teacher=layers(seed, width=12))
    given = {"max_duration": "2ep", "microbatch_size": 4} | given
    with (
        contextlib.suppress(EOFError),
        isolated_trainer(
            folder, task, algorithms=[*plugins, distill, Ends(batch)], **given
        ) as trainer,
    ):
        trainer.fit()
    teacher = distill._model
    kinds = {DTensor if isinstance(one, DTensor) else Tensor for one in teacher.parameters()}
    num_held = sum(local(one).numel() for one in teacher.parameters())
    weights = trainer.state.model.state_dict().items()
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights
    }, {
        "kinds": {one.__name__ for one in kinds},
        "held": num_held,
        "parts": sum(isinstance(one, FSDPModule) for one in teacher.modules()),
        "trains": any(one.requires_grad or one.grad is not None for one in teacher.parameters()),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"reshard_after_forward": False}])
def test_a_sharded_teacher_teaches_what_a_whole_one_does(tmp_path, options):
    """Each rank holds half of it, also after a forward pass; the weights are those of one process."""
    expected, alone = fit(tmp_path / "one", batch_size=16, microbatch_size=8)

    (actual, of_first), (_, of_second) = run_ranks(lambda: fit(tmp_path / "two", Fsdp(**options)))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert alone == {"kinds": {"Tensor"}, "held": alone["held"], "parts": 0, "trains": False}
    if options.get("reshard_after_forward", True):
        assert of_first["kinds"] == {"DTensor"}
        assert of_first["held"] + of_second["held"] == alone["held"]
    assert of_first["parts"] == 3
    assert not of_first["trains"]


def test_another_teacher_teaches_something_else(tmp_path):
    """Control: the comparison sees the teacher."""
    expected, _ = fit(tmp_path / "one", seed=5)
    actual, _ = fit(tmp_path / "two", seed=6)

    with pytest.raises(AssertionError):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_sharded_ranks_go_on_with_their_teacher_and_no_other(tmp_path):
    """The digest is the same in one process and in shards; averages leave the teacher alone."""
    plugins = lambda: (Fsdp(), Ema())  # noqa: E731
    saves = {"checkpoint_interval": "2ba"}
    expected = run_ranks(lambda: fit(tmp_path / "one", *plugins(), **saves))[0][0]
    run_ranks(lambda: fit(tmp_path / "two", *plugins(), batch=4, **saves))

    def other():
        try:
            fit(tmp_path / "two", *plugins(), seed=6, **saves)
        except EventloopError as error:
            return str(error)

    assert "companions.distill: weights" in run_ranks(other)[0]
    actual = run_ranks(lambda: fit(tmp_path / "two", *plugins(), **saves))[0][0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
