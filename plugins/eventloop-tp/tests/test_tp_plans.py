"""Plans: what they name, and what they can't divide, before any rank is started."""

from __future__ import annotations

import pytest
from torch import nn

from eventloop import SettingError
from eventloop_tp.plans import missing, plan_of, resolved


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 6
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(12)


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_patterns_name_modules_and_the_last_one_counts():
    """As shell patterns do."""
    plan = {"blocks.*.attention.qkv": "colwise", "blocks.1.*.qkv": "replicated"}

    placed = resolved(Net(), plan, 2)

    assert [(one.name, one.style) for one in placed] == [
        ("blocks.0.attention.qkv", "colwise"),
        ("blocks.1.attention.qkv", "replicated"),
    ]


@pytest.mark.parametrize(
    ("plan", "size", "words"),
    [
        ({"blocks.*.attention.qvk": "colwise"}, 2, r"no module 'blocks.\*.attention.qvk'"),
        ({"head": "columnwise"}, 2, "'columnwise', which is not a style of tp; the closest is 'colwise'"),
        ({"head": "packed_colwise"}, 2, "'packed_colwise', which is not a style"),
        ({"head": "colwise"}, 3, r"head.weight is \(20, 12\), and 20 can't be divided by 3"),
        ({"blocks.*.attention.qkv": "colwise"}, 4, "attention has num_heads = 6, which can't be divided by 4"),
        ({"blocks.*.norm": "colwise"}, 2, "of class LayerNorm"),
    ],
)  # fmt: skip
def test_what_can_not_be_divided_is_refused_by_name(plan, size, words):
    """A name that is misspelt, a style, a number of heads: before the first step."""
    with pytest.raises(SettingError, match=words):
        resolved(Net(), plan, size)


def test_tied_parameters_are_divided_alike_or_refused():
    """A parameter lies in one way on the ranks, whoever uses it."""
    with pytest.raises(SettingError, match=r"embedding.weight and head.weight are one parameter"):
        resolved(Net(tied=True), {"head": "colwise"}, 2)

    resolved(Net(tied=True), {"head": "colwise", "embedding": "rowwise"}, 2)


def test_a_model_brings_its_own_plan_which_may_name_what_it_lacks():
    """A family of models has one plan for all of them."""
    model = Net()
    model.tp_plan = {"head": "colwise_rep", "blocks.*.q_norm": "replicated_with_grad_allreduce"}

    placed = resolved(model, plan_of(model), 2, is_own=True)

    assert [(one.name, one.style) for one in placed] == [("head", "colwise_gather_output")]
    assert "blocks.0.norm" in missing(model, placed)
