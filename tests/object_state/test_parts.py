"""Which parts of an object are visited."""

from __future__ import annotations

import functools
import random

import torch
from torch import nn

from eventloop.object_state.walk import walk


def test_a_closure_and_what_a_function_calls_are_entered():
    """State that no attribute has: of a closure, a partial function, a bound method."""
    rng = random.Random(0)

    def draw(scale):
        return scale * rng.random()

    locations = walk({"draw": functools.partial(draw, 2.0)}).locations

    assert locations["draw.func.<rng>"].value is rng
    assert locations["draw.args"].value == (2.0,)


def test_a_module_shows_what_its_state_dict_leaves_out():
    """And weights: a module that no other module has registered isn't in a state_dict."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("mean", torch.zeros(2), persistent=False)
    model.num_steps = 3

    paths = walk({"model": model}).locations

    assert {"model.num_steps", "model.0.mean", "model.1.training"} <= paths.keys()
    assert {"model.0.weight", "model.1.running_mean"} <= paths.keys()
    assert not any("_hooks" in path for path in paths)


def test_a_compiled_module_has_the_paths_of_the_plain_one():
    """A run may be resumed with or without compilation."""
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model)

    assert walk({"model": compiled}).locations.keys() == walk({"model": model}).locations.keys()


def test_hooks_of_training_are_parts_and_those_of_a_state_dict_are_not():
    """FSDP2 registers the latter when the first batch comes, in a resumed run again."""
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: None)
    layer.register_load_state_dict_pre_hook(lambda *_: None)

    paths = walk({"layer": layer}).locations

    assert "layer._forward_hooks[0]" in paths
    assert not any("state_dict" in path for path in paths)


def test_what_torch_keeps_at_an_optimizer_is_no_state_of_the_run():
    """A scheduler sets `_opt_called`, a class may have attributes of its own; only these are state."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.num_restarts = 2
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()

    paths = walk({"optimizer": optimizer}).locations

    assert vars(optimizer)["_opt_called"]
    assert "optimizer.num_restarts" in paths
    assert not {"optimizer._opt_called", "optimizer.state", "optimizer.defaults"} & paths.keys()
