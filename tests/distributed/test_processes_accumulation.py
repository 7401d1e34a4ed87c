"""The gradient of a batch is the same however it is sliced, with losses that weigh tokens."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop.distributed.processes import Parts
from eventloop_testing import isolated_trainer, run_ranks

# N = sequences, T = tokens a sequence, V = words; 0 is padding, which no loss counts.
N, T, V = 48, 12, 11
GENERATOR = torch.Generator().manual_seed(0)
WORDS_NT = torch.randint(1, V, (N, T), generator=GENERATOR)
LENGTHS_N = torch.randint(0, T + 1, (N,), generator=GENERATOR)
WORDS_NT[torch.arange(T) >= LENGTHS_N[:, None]] = 0


class Gradients:
    """Keeps the gradients of the first batch."""

    name = "gradients"

    def __init__(self):
        self.kept = {}

    @hookimpl
    def after_train_batch(self, state):
        named = state.model.named_parameters()
        self.kept = {name: param.grad.clone() for name, param in named}
        self.kept["loss"] = state.loss


def token_loss(logits, words):
    return cross_entropy(logits.transpose(1, 2), words, ignore_index=0)


@pytest.fixture
def gradients(tmp_path):
    """Trains on one batch of all sequences; gives the gradients and the loss."""

    def gradients(
        microbatch_size=None,
        loss_weight=lambda targets: (targets != 0).sum(),
        kept=None,
        **settings,
    ):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        task = Task(
            model=lambda: nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)),
            loss=token_loss,
            train_dataloader=DataLoader(TensorDataset(WORDS_NT, WORDS_NT), N // world_size),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            loss_weight=loss_weight,
        )
        kept = kept or Gradients()
        settings = {"max_duration": "1ba", "microbatch_size": microbatch_size, **settings}
        with isolated_trainer(tmp_path, task, algorithms=[kept], **settings) as trainer:
            trainer.fit()
        return kept.kept

    return gradients


def assert_near(actual, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)


def test_there_are_sequences_of_padding_alone():
    """A mean over nothing is NaN, and must not spread."""
    assert (LENGTHS_N == 0).any()
    assert token_loss(torch.zeros(1, T, V), WORDS_NT[LENGTHS_N == 0][:1]).isnan()


@pytest.mark.parametrize("microbatch_size", [16, 7, 1, "auto"])
def test_microbatches_of_any_size_give_one_gradient(gradients, microbatch_size):
    """Each weighs its tokens, so that a short sequence's don't count more."""
    assert_near(gradients(microbatch_size), gradients())


@pytest.mark.parametrize("microbatch_size", [None, 16, 7, 1])
def test_ranks_give_one_gradient(gradients, microbatch_size):
    """The ranks' tokens differ in number, too."""
    expected = gradients()
    ranks = run_ranks(gradients, microbatch_size)

    loss = torch.stack([actual.pop("loss") for actual in ranks]).mean()
    torch.testing.assert_close(loss, expected.pop("loss"), rtol=0, atol=1e-6)
    for actual in ranks:
        assert_near(actual, expected)


class WeighsTokens(Gradients):
    """Weighs as the task would."""

    @hookimpl
    def weigh_microbatch(self, state):
        return (state.targets != 0).sum()


@pytest.mark.parametrize("microbatch_size", [16, "auto"])
def test_a_plugin_may_weigh(gradients, microbatch_size):
    """The action has an owner like any other; the task's count isn't asked for it."""
    plugin = WeighsTokens()
    assert_near(gradients(microbatch_size, loss_weight=None, kept=plugin), gradients())


@pytest.mark.filterwarnings("ignore:microbatches of 7 train something else")
def test_weighing_samples_instead_gives_another_gradient(gradients):
    """Control: the sequences are of different lengths."""
    with pytest.raises(AssertionError):
        assert_near(gradients(7, loss_weight=lambda: 1.0), gradients())


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_what_weighs_nothing_adds_nothing(kind):
    """Whether the weights are numbers or tensors; a batch that weighs nothing in all, too."""
    param = torch.ones((), requires_grad=True)
    nothing = Parts([kind(0.0), kind(2.0)], lambda: kind(2.0)).scaled(param * torch.nan, 0)
    empty = Parts([kind(0.0)], lambda: kind(0.0)).scaled(param * 3, 0)

    (nothing + empty).backward()

    assert (nothing.item(), empty.item()) == (0.0, 0.0)
    assert empty.requires_grad


def test_a_batch_without_weight_has_finite_gradients():
    """Weights that are tensors, on a device, aren't read in a step."""
    param = torch.ones((), requires_grad=True)

    Parts([torch.tensor(0)], lambda: torch.tensor(0)).scaled(param * 3, 0).backward()

    assert param.grad == 0
