"""A pipeline as a plugin: each rank holds a stage of the model, and torch's 1F1B schedule computes."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop.toolbox import SavedTensor, TensorSlice, sum_over_, total_norm
from eventloop_testing import isolated_trainer, run_ranks

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)
WIDTH = 8


def net():
    layers = [nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class Pipeline:
    """Splits an nn.Sequential in two; checkpoints and exports are those of the whole."""

    def __init__(self, cut=2, num_microbatches=3):
        self.cut, self.num_microbatches = cut, num_microbatches
        self.shapes, self.order, self.found = {}, [], None

    @hookimpl(wrapper=True)
    def build_mesh(self, state):
        return (yield).sharing("stage", 2, holds_parts=True)

    @hookimpl(wrapper=True)
    def build_model(self, state):
        whole = yield
        self.shapes = {name: one.shape for name, one in whole.state_dict().items()}
        self.order = [name for name, _ in whole.named_parameters()]
        self.idx = state.layout.position(state.rank)["stage"]
        part = whole[: self.cut] if self.idx == 0 else whole[self.cut :]
        first = 0 if self.idx == 0 else self.cut
        # Under the names of the whole.
        return nn.Sequential(OrderedDict((str(first + at), one) for at, one in enumerate(part)))

    @hookimpl
    def wrap_model(self, state):
        self.group = state.mesh.get_group("stage")
        stage = PipelineStage(state.model, self.idx, 2, state.device, group=self.group)
        self.schedule = Schedule1F1B(stage, self.num_microbatches, loss_fn=cross_entropy)
        return state.model

    @hookimpl
    def forward(self, state):
        if state.microbatch is None:
            return self.evaluated(state)
        inputs, targets = state.microbatch
        losses = []
        if self.idx == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets, losses=losses)
        self.found = (
            torch.stack(losses).mean().detach() if losses else torch.zeros((), device=state.device)
        )
        dist.broadcast(self.found, group=self.group, group_src=1)
        return self.found

    def evaluated(self, state):
        inputs, _ = state.batch
        hidden = (
            state.model(inputs)
            if self.idx == 0
            else torch.empty(len(inputs), WIDTH, device=state.device)
        )
        dist.broadcast(hidden, group=self.group, group_src=0)
        outputs = (
            state.model(hidden)
            if self.idx == 1
            else torch.empty(len(inputs), 3, device=state.device)
        )
        dist.broadcast(outputs, group=self.group, group_src=1)
        return outputs

    @hookimpl(conditional=True)
    def loss(self, state):
        return None if state.microbatch is None else self.found

    @hookimpl
    def backward(self, state, loss):
        for param in state.model.parameters():
            dist.all_reduce(param.grad, group=state.data_group)
            param.grad /= state.data_world_size
        return True

    @hookimpl
    def clip_gradients(self, state, optimizers):
        square = total_norm([one.grad for one in state.model.parameters()]).square()
        sum_over_([square], [(self.group,)])
        nn.utils.clip_grads_with_norm_(state.model.parameters(), 0.05, square.sqrt())
        return {"grad_norm": square.sqrt()}

    def sliced(self, tensors, shapes, state):
        def slice_of(name, shape):
            held = tensors.get(name, torch.empty((0,) * len(shape)))
            return TensorSlice(held, tuple(shape), (0,) * len(shape), is_copy=state.data_rank > 0)

        return {name: slice_of(name, shape) for name, shape in shapes.items()}

    @hookimpl
    def capture_model(self, state):
        return self.sliced(state.model.state_dict(), self.shapes, state)

    @hookimpl
    def restore_model(self, state, weights, strict):
        own = {name: read(weights[name]) for name in state.model.state_dict()}
        state.model.load_state_dict(own, strict=strict)
        return True

    @hookimpl
    def capture_optimizers(self, state):
        found = state.optimizers["adamw"].state_dict()
        names = [name for name, _ in state.model.named_parameters()]
        own = {names[idx]: one for idx, one in found["state"].items()}
        shapes = {name: self.shapes[name] for name in self.order}
        parts = {
            key: self.sliced({name: one[key] for name, one in own.items()}, shapes, state)
            for key in ("exp_avg", "exp_avg_sq")
        }
        step = next((one["step"] for one in own.values()), None)
        states = {
            idx: {"step": step, **{key: one[name] for key, one in parts.items()}}
            for idx, name in enumerate(self.order if own else ())
        }
        (group,) = found["param_groups"]
        group = group | {"params": [*range(len(self.order))]}
        return {"adamw": {"state": states, "param_groups": [group]}}

    @hookimpl
    def restore_optimizers(self, state, states):
        saved = states["adamw"]
        names = [name for name, _ in state.model.named_parameters()]
        own = {
            idx: {key: read(one) for key, one in saved["state"][self.order.index(name)].items()}
            for idx, name in enumerate(names)
        }
        (group,) = saved["param_groups"]
        given = {"state": own, "param_groups": [group | {"params": [*range(len(names))]}]}
        state.optimizers["adamw"].load_state_dict(given)
        return True


def read(value):
    return value.read() if isinstance(value, SavedTensor) else value


class Clips:
    """Stands in one process where Pipeline clips."""

    @hookimpl
    def clip_gradients(self, state, optimizers):
        grads = [one.grad for one in state.model.parameters()]
        nn.utils.clip_grads_with_norm_(state.model.parameters(), 0.05, total_norm(grads))
        return {}


def train(folder, plugins, batch_size, until=None):
    """Trains three epochs; returns weights, the last evaluation, and the moment."""
    task = Task(
        model=net,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(TensorDataset(X, Y), batch_size),
        eval_dataloaders=lambda: DataLoader(TensorDataset(X[:8], Y[:8]), 2),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    given = {"max_duration": "3ep", "checkpoint_interval": "1ba"}
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        result = trainer.fit(until=until)
        path = trainer.export(folder / "model.safetensors")
        moment = trainer.state.clock.moment()._replace(seconds=0)
        loss = result.metrics["eval"]["loss"].item() if result.metrics else None
    return load_file(path) if path.exists() else {}, loss, moment


def assert_near(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_two_stages_train_what_one_process_would_and_go_on(tmp_path, world_size):
    weights, loss, moment = train(tmp_path / "one", [Clips()], 12)
    size = 24 // world_size

    whole = run_ranks(train, tmp_path / "whole", [Pipeline()], size, world_size=world_size)
    run_ranks(train, tmp_path / "run", [Pipeline()], size, "7ba", world_size=world_size)
    resumed = run_ranks(train, tmp_path / "run", [Pipeline()], size, world_size=world_size)

    assert_near(whole[0][0], weights)
    assert [one[1:] for one in whole] == [(pytest.approx(loss, abs=1e-6), moment)] * world_size
    assert_near(resumed[0][0], whole[0][0], 0)
