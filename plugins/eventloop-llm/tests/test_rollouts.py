"""Completions and the seeds that they are drawn from; the hooks are tested by the packages that call them."""

from __future__ import annotations

import re

import pytest
import torch
from grpo_cases import llama, prompts

from eventloop_llm.rollouts.completions import prompts_of, texts_of
from eventloop_llm.rollouts.generation import Sampling, generated, seeds_of


def test_a_completion_depends_on_its_prompt_and_seed_alone():
    """Not on what else is generated at the same time, nor on the global generators."""
    rows = prompts(4)
    ids, mask = (
        torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")
    )
    model, sampling = llama().eval(), Sampling(6, temperature=0.8, top_k=8, top_p=0.95)

    whole = generated(model, ids, mask, [11, 12, 13, 14], sampling, pad_token_id=0)
    torch.manual_seed(5)
    parts = [
        generated(model, ids[one], mask[one], seeds, sampling, pad_token_id=0)
        for one, seeds in ((slice(0, 1), [11]), (slice(1, 4), [12, 13, 14]))
    ]

    assert torch.equal(whole[:1, : parts[0].shape[1]], parts[0])
    assert torch.equal(whole[1:, : parts[1].shape[1]], parts[1])
    other = generated(model, ids, mask, [21, 22, 23, 24], sampling, pad_token_id=0)
    assert other.shape != whole.shape or not torch.equal(other, whole)


def test_draws_are_those_of_the_distribution():
    """Logits with Gumbel noise: the frequency of each token is its probability."""
    rows = prompts(1)[0]
    ids, mask = rows["input_ids"][None], rows["attention_mask"][None]
    model, num = llama(), 4000
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, attention_mask=mask).logits[0, -1].softmax(-1)

    found = generated(
        model, ids.expand(num, -1), mask.expand(num, -1), range(num), Sampling(1), pad_token_id=0
    )

    shares = found[:, 0].bincount(minlength=len(expected)) / num
    assert float((shares - expected).abs().max()) < 4 * (0.25 / num) ** 0.5


def test_penalties_of_the_models_own_configuration_change_no_draw():
    """The loss computes log-probabilities, and knows nothing of them."""
    rows, model, sampling = prompts(1)[0], llama().eval(), Sampling(6)
    ids, mask = rows["input_ids"][None], rows["attention_mask"][None]
    expected = generated(model, ids, mask, [11], sampling, pad_token_id=0)
    config = model.generation_config
    config.repetition_penalty, config.suppress_tokens = 5.0, expected[0, :1].tolist()

    found = generated(model, ids, mask, [11], sampling, pad_token_id=0)

    assert torch.equal(found, expected)
    assert model.generation_config is config


def test_a_seed_follows_from_the_place_of_its_completion():
    """Whatever the number of ranks; another batch and another run have others."""
    whole = seeds_of(3, 7, 4, 2, 0, 1)
    halves = [seeds_of(3, 7, 2, 2, rank, 2) for rank in range(2)]

    assert whole == [*halves[0][:2], *halves[1][:2], *halves[0][2:], *halves[1][2:]]
    assert len({*whole, *seeds_of(3, 8, 4, 2, 0, 1), *seeds_of(4, 7, 4, 2, 0, 1)}) == 24


def test_rollouts_are_moved_but_not_their_columns():
    """Whose texts and numbers a reward reads on the host."""
    rollouts = prompts_of({"input_ids": torch.full((2, 3), 4), "wanted": [4, 5]}, 2)

    moved = rollouts.to(torch.device("meta"))

    assert moved is rollouts
    assert {moved.prompt_ids.device.type, moved.completion_mask.device.type} == {"meta"}
    assert moved.columns == {"wanted": [4, 4, 5, 5]}


def test_each_prompt_is_there_once_for_each_completion():
    """What else a batch has of it, too; without a tokenizer texts are numbers."""
    batch = {
        "input_ids": torch.tensor([[0, 5], [6, 7]]),
        "attention_mask": torch.tensor([[0, 1], [1, 1]]),
        "answer": ["a", "b"],
        "seed": 3,
    }

    found = prompts_of(batch, 2)

    assert texts_of(found.prompt_ids, found.prompt_mask, None) == ["5", "5", "6 7", "6 7"]
    assert found.columns == {"answer": ["a", "a", "b", "b"]}
    assert found.completion_ids.shape == (4, 0)


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ({"ids": torch.zeros(2, 3)}, "a batch of prompts is a mapping with 'input_ids'"),
        (torch.zeros(2, 3), "not Tensor"),
        (
            {"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 3)},
            "no labels: this is one of",
        ),
        (
            {"input_ids": torch.zeros(1, 2), "attention_mask": torch.tensor([[1, 0]])},
            "padded on the right; pad them on the left",
        ),
        ({"input_ids": torch.zeros(3)}, "have the shapes ((3,), (3,)), not (B, P)"),
    ],
)
def test_a_batch_without_prompts_is_refused(batch, shown):
    """With what it has."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        prompts_of(batch, 2)
