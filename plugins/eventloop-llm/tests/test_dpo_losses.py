"""The maths, and rows as tokens."""

from __future__ import annotations

import math
import re

import pytest
import torch
from dpo_cases import ANSWERS, CHATS, PAIRS, dpo_task
from sft_cases import tokenizer

from eventloop import SettingError, TaskError
from eventloop_llm.chats.pairs import PairBatch, Pairs
from eventloop_llm.chats.tokens import Conversations
from eventloop_llm.preferences.answers import answers_of, cut_pairs_of
from eventloop_llm.preferences.preference_losses import LOSSES, LossOptions, kto_losses, pair_losses

CHOSEN, REJECTED = torch.tensor([-1.5, -0.1, -7.0]), torch.tensor([-2.5, -0.4, -3.0])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def by_hand(loss, chosen, rejected, o):
    """The formulas of the papers, on numbers."""
    ahead = chosen - rejected
    if loss == "ipo":
        return (ahead - 1 / (2 * o.beta)) ** 2
    if loss == "orpo":
        odds = [math.exp(one) / (1 - math.exp(one)) for one in (chosen, rejected)]
        return -o.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
    margin = o.beta * ahead - o.gamma
    right = (1 - o.label_smoothing) * math.log(sigmoid(margin))
    return -right - o.label_smoothing * math.log(sigmoid(-margin))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"kto"}))
def test_losses_of_pairs_are_those_of_the_papers(loss, smoothing):
    """Also where a probability is near 1, which the odds of ORPO divide by."""
    options = LossOptions(beta=0.7, gamma=0.3, label_smoothing=smoothing)
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone()

    actual = pair_losses(loss, chosen, rejected, options)
    actual.sum().backward()

    expected = [
        by_hand(loss, one, two, options)
        for one, two in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)
    ]
    torch.testing.assert_close(actual.tolist(), expected, rtol=1e-5, atol=0)
    assert chosen.grad.isfinite().all()


def test_an_answer_that_is_certain_has_a_gradient():
    """The mean log-probability of one token can be 0, whose odds are infinite."""
    chosen, rejected = (torch.zeros(2, requires_grad=True) for _ in range(2))

    loss = pair_losses("orpo", chosen - torch.tensor([0.0, 3.0]), rejected, LOSSES["orpo"]).sum()

    grads = torch.autograd.grad(loss, (chosen, rejected))
    assert all(one.isfinite().all() for one in (loss, *grads))


def test_losses_of_answers_are_those_of_the_paper():
    """Wanted ones gain by being likelier than the reference has them, others lose by it."""
    ratios, is_desired = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([True, False, False])

    actual = kto_losses(
        ratios, is_desired, torch.tensor(0.4), beta=0.3, desired_weight=2.0, undesired_weight=0.5
    )

    expected = [
        2 * (1 - sigmoid(0.3 * (1.0 - 0.4))),
        0.5 * (1 - sigmoid(0.3 * (0.4 + 2.0))),
        0.5 * (1 - sigmoid(0.3 * (0.4 - 0.5))),
    ]
    torch.testing.assert_close(actual.tolist(), expected, rtol=1e-5, atol=0)


def test_a_chat_that_begins_alike_is_a_prompt():
    """Two whole chats are a pair as well."""
    whole = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in CHATS]
    conversations = Conversations(tokenizer(), "completion")

    assert cut_pairs_of(whole, "a", conversations, 48) == cut_pairs_of(
        CHATS, "a", conversations, 48
    )


def test_answers_go_around():
    """Each prompt has the answer to the one before beside its own; a pair is two answers to one prompt."""
    conversations = Conversations(tokenizer(), "completion")

    found = answers_of(PAIRS[:3], "a", conversations, 48, None)
    groups = answers_of(ANSWERS[:8], "a", conversations, 48, 4)

    assert [one.numbers["is_desired"] for one in found] == [True, False] * 3
    for answers, befores in ((found, [5, 5, 1, 1, 3, 3]), (groups, [3, 0, 1, 2, 7, 4, 5, 6])):
        for one, before in zip(answers, befores, strict=True):
            labels = [
                [x for x in doc.labels if x != -100] for doc in (one.second, answers[before].first)
            ]
            assert labels[0] == labels[1]
            num = len(one.first.labels) - sum(x != -100 for x in one.first.labels)
            assert one.second.input_ids[:num] == one.first.input_ids[:num]
    assert [one.numbers["is_desired"] for one in groups] == [row["label"] for row in ANSWERS[:8]]


def test_a_batch_has_both_documents_of_each_row():
    """So that microbatches are slices of rows."""
    rows = Pairs(cut_pairs_of(PAIRS, "a", Conversations(tokenizer(), "completion"), 48), 7)

    batch = PairBatch(0)([rows[0], rows[3]])

    assert batch["input_ids"].shape[:2] == (2, 2)
    assert batch["number"].tolist() == [7, 10]
    assert (
        rows.digest
        != Pairs(cut_pairs_of(PAIRS[1:], "a", Conversations(tokenizer(), "completion"), 48)).digest
    )


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "w1", "chosen": "w2"}, "it has 'prompt', 'chosen'; give prompt, chosen"),
        ({"chosen": "w2", "rejected": "w3"}, "chosen is a text, and there is no prompt"),
    ],
)
def test_a_row_that_is_no_pair_is_named(row, shown):
    """Before training, with its number."""
    with pytest.raises(TaskError, match=f"row 1 of a can't be trained on: {re.escape(shown)}"):
        cut_pairs_of([PAIRS[0], row], "a", Conversations(tokenizer(), "completion"), 48)


@pytest.mark.parametrize(
    "given",
    [
        {"loss": "simpo", "reference_model": "a"},
        {"loss": "orpo", "store_reference": True},
        {"loss": "cpo", "reference": "companion"},
        {"loss": "ipo", "gamma": 1.0},
        {"loss": "orpo", "label_smoothing": 0.1},
        {"loss": "kto", "nll_weight": 1.0},
        {"loss": "dpo", "rotate_in": 4},
        {"loss": "dpo", "desired_weight": 2.0},
    ],
    ids=str,
)
def test_an_option_that_a_loss_does_not_have_is_an_error(given):
    """It would have no effect."""
    name = [*given][1]

    with pytest.raises(SettingError, match=f"{name} has no effect with loss='{given['loss']}'"):
        dpo_task(**given)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"beta": 0.0}, "beta=0.0 is not a positive number"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0.5 isn't in \[0, 0.5\)"),
        ({"nll_weight": -1.0}, "nll_weight=-1.0 isn't a finite number of 0 or more"),
        ({"nll_weight": math.nan}, "nll_weight=nan isn't a finite"),
        ({"gamma": math.inf}, "gamma=inf isn't a finite"),
        ({"loss": "kto", "desired_weight": -1.0}, "desired_weight=-1.0 isn't a finite"),
        ({"loss": "kto", "undesired_weight": math.nan}, "undesired_weight=nan isn't a finite"),
    ],
)
def test_numbers_without_a_meaning_are_refused(given, shown):
    """Before there is a model."""
    with pytest.raises(ValueError, match=shown):
        dpo_task(**given)
