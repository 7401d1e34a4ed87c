"""Which weights are hidden matrices."""

import pytest
from torch import nn

from eventloop_muon import split


class Gpt(nn.Module):
    """A language model of one block; its head may be its embedding."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.places = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight


def conv_net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 10))


def names(model, **options):
    """Returns the names of the three kinds of weights."""
    known = {param: name for name, param in model.named_parameters()}
    return [[known[param] for param in kind] for kind in split(model, **options)]


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_ends_are_outside(tied):
    """As the method's author advises; a head that is an embedding doesn't make `down` the last."""
    hidden, wide, narrow = names(Gpt(tied=tied))

    assert hidden == ["up.weight", "down.weight"]
    assert wide == ["words.weight", "places.weight"] + ([] if tied else ["head.weight"])
    assert narrow == ["norm.weight", "norm.bias", "up.bias"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), ["1.weight"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []),
        (conv_net(), []),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)), ["1.weight"]),
        (nn.MultiheadAttention(4, 2), []),
        (nn.TransformerEncoderLayer(4, 2, 8), ["self_attn.out_proj.weight", "linear1.weight"]),
    ],
    ids=["mlp", "two layers", "conv", "vit", "attention", "encoder"],
)
def test_what_lies_between_the_ends_is_hidden(model, expected):
    """Convolutions aren't matrices to torch's Muon; they count as ends."""
    assert names(model)[0] == expected


def test_patterns_say_what_no_shape_can():
    """Layers may be registered in any order, and a matrix may be an embedding to its author."""
    assert names(Gpt(), hidden=["up.*", "head.*"])[0] == ["up.weight", "head.weight"]
    assert names(Gpt(), not_hidden=["down.*"])[0] == ["up.weight"]
    assert names(Gpt(), hidden=["*.weight"], not_hidden=["*s.*"])[0] == [
        "up.weight",
        "down.weight",
        "head.weight",
    ]


def test_a_tied_weight_is_hidden_only_if_all_its_places_are():
    """A step can't be Muon's in one place and AdamW's in another."""
    assert names(Gpt(tied=True), hidden=["head.*", "up.*"])[0] == ["up.weight"]
    assert names(Gpt(tied=True), hidden=["*"], not_hidden=["head.*"])[0] == [
        "places.weight",
        "up.weight",
        "down.weight",
    ]


def test_every_parameter_is_in_one_kind_frozen_ones_too():
    """One that is unfrozen later must have an optimizer."""
    model = Gpt(tied=True)
    model.up.weight.requires_grad_(False)

    kinds = split(model)

    assert {param for kind in kinds for param in kind} == set(model.parameters())
    assert sum(map(len, kinds)) == len(list(model.parameters()))


@pytest.mark.parametrize("option", ["hidden", "not_hidden"])
def test_a_pattern_without_a_parameter_is_named(option):
    """A misspelt one would leave everything to the other optimizer."""
    with pytest.raises(ValueError, match=r"'dwon\.\*' is the name of no parameter.*down\.weight"):
        split(Gpt(), **{option: ["dwon.*"]})
