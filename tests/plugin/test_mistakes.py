"""What a plugin keeps for a resumed run is saved and restored, or refused at the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop import PluginError, hookimpl
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.mistakes import keeps_state, mistakes
from eventloop.plugin.records import FROM_ENTRY_POINT, Plugin


class Base:
    @hookimpl
    def batch_end(self, state): ...


class Whole(Base):
    def state_dict(self):
        return {}

    def load_state_dict(self, state, version): ...


class OnlySaves(Base):
    def state_dict(self):
        return {}


class OnlyLoads(Base):
    def load_state_dict(self, state, version): ...


class WithoutVersion(Whole):
    def load_state_dict(self, state): ...


class AsTorch(Whole):
    def load_state_dict(self, state_dict, strict=True): ...


class KeywordOnly(Whole):
    def load_state_dict(self, state, *, version): ...


class NeedsPrefix(Whole):
    def state_dict(self, prefix):
        return {}


class PerRank(Base):
    state_per_rank = True


class Average(Base, nn.Module):
    """Has both methods from torch."""


class Shadow(Base, nn.Module):
    def state_dict(self):
        return {}


def made(target, role="algorithm"):
    return Plugin("ema", role, target, "eventloop-ema", "0.2.1", FROM_ENTRY_POINT)


BACK = "write `def load_state_dict(self, state, version)`"
CALLED = (
    "load_state_dict is called with two arguments, the state and the version of the plugin that "
    "wrote it"
)
LOST = "it has state_dict without load_state_dict, so its saved state would never be loaded"


@pytest.mark.parametrize(
    ("kind", "what", "method", "fix"),
    [
        (OnlySaves, LOST, "state_dict", BACK),
        (Shadow, LOST, "state_dict", BACK),
        (
            OnlyLoads,
            "it has load_state_dict without state_dict, so no state would be saved for it",
            "load_state_dict",
            "write `def state_dict(self)`",
        ),
        (WithoutVersion, CALLED, "load_state_dict", BACK),
        (AsTorch, CALLED, "load_state_dict", BACK),
        (KeywordOnly, CALLED, "load_state_dict", BACK),
        (
            NeedsPrefix,
            "state_dict is called without arguments",
            "state_dict",
            "write `def state_dict(self)`",
        ),
        (
            PerRank,
            "state_per_rank=True has no effect without a state",
            "state_per_rank",
            "write `state_dict(self)` and `load_state_dict(self, state, version)`, or leave it out",
        ),
    ],
)
def test_what_would_lose_a_state_is_refused(kind, what, method, fix):
    """It would show after the first kill, when it is too late."""
    (problem,) = mistakes(made(kind()), HOOKS)

    assert str(problem) == (
        f"{what}\n"
        f"  plugin  ema (eventloop-ema 0.2.1), method {kind.__name__}.{method}\n"
        f'  fix     {fix}, or switch the plugin off with `disable = ["ema"]` in [tool.eventloop] of pyproject.toml'
    )


@pytest.mark.parametrize("kind", [Base, Whole, Average])
def test_a_whole_state_or_none_is_right(kind):
    """Control. A plugin that is a module has torch's methods without a thought of them."""
    plugin = made(kind())

    assert list(mistakes(plugin, HOOKS)) == []
    assert keeps_state(plugin) is (kind is Whole)


@pytest.mark.parametrize(
    "target",
    [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), nn.Linear(1, 1)],
    ids=["optimizer", "module"],
)
def test_what_is_torchs_is_no_state_of_a_plugin(target):
    """An optimizer's methods take other arguments, and its state is the run's."""
    assert not keeps_state(made(target))
    assert list(mistakes(made(target), HOOKS)) == []


def test_a_trainer_refuses_half_a_state(make_trainer):
    """Before anything is trained, with everything else that is wrong."""
    with pytest.raises(PluginError, match="would never be loaded") as caught:
        make_trainer(algorithms=[OnlySaves(), WithoutVersion()])

    assert CALLED in str(caught.value)
