"""The losses and weights of TRL's trainers, on the same rows in the same order, in fp32."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from dpo_cases import (
    ANSWERS,
    CHATS,
    PAIRS,
    llama,
    new_adapters,
    other,
    theirs,
    trained,
    with_adapters,
)
from sft_cases import text

from eventloop_fsdp import Fsdp
from eventloop_testing import run_ranks

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL isn't installed", allow_module_level=True)

# What is compared: rows, our options, TRL's trainer and its options.
CASES = {
    "dpo": (CHATS, {}, "DPO", {}),
    "dpo, means": (PAIRS, {"average": True}, "DPO", {"loss_type": ["sigmoid_norm"]}),
    "dpo, beta": (PAIRS, {"beta": 0.5}, "DPO", {"beta": 0.5}),
    "ipo": (PAIRS, {"loss": "ipo", "beta": 1.0}, "DPO", {"loss_type": ["ipo"], "beta": 1.0}),
    "kto": (
        ANSWERS,
        {"loss": "kto", "rotate_in": 6, "desired_weight": 0.7},
        "KTO",
        {"desirable_weight": 0.7},
    ),
    "orpo": (PAIRS, {"loss": "orpo", "nll_on": "all"}, "ORPO", {}),
    "simpo": (
        PAIRS,
        {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
        "CPO",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "cpo": (PAIRS, {"loss": "cpo", "label_smoothing": 0.1}, "CPO", {"label_smoothing": 0.1}),
}
# TRL's own loss of a chosen answer is a mean over the tokens of a rank, here of the batch of all ranks:
# the same where prompts and chosen answers are equally long.
EVEN = [
    row | {"prompt": text(seed, 5) + " ", "chosen": text(seed + 50, 4)}
    for seed, row in enumerate(PAIRS)
]
COMPARED = ("dpo", "dpo, means", "dpo, beta", "ipo", "kto")
MICROBATCHES = {
    "whole": {},
    "1": {"microbatch_size": 1},
    "3": {"microbatch_size": 3},
    "3, sliced": {"settings": {"microbatch_size": 3}},
}


def require_equal(actual, expected):
    for mine, trls in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, trls, rtol=0, atol=1e-6)


# TRL compares a model that has adapters with a copy of them, one with new adapters with its base.
MODELS = {
    "full": (llama, other, {"reference_model": other}),
    "stored": (llama, other, {"reference_model": other, "store_reference": True}),
    "LoRA": (with_adapters, None, {"reference": "companion"}),
    "new LoRA": (new_adapters, None, {}),
    "new LoRA, stored": (new_adapters, None, {"store_reference": True}),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_it_ends_with_the_losses_and_weights_of_trl(tmp_path, case, model):
    """Each loss and each reference, however a batch is cut."""
    rows, options, trainer, their_options = CASES[case]
    make, ref, more = MODELS[model]
    if case not in COMPARED:
        ref, more = None, {}
    expected = theirs(trainer, rows, make, ref, **their_options)

    for name, given in MICROBATCHES.items():
        given = {"rows": rows, "model": make, "shuffle": False} | options | more | given
        require_equal(trained(tmp_path / name, **given), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["dpo", "ipo", "kto", "simpo", "orpo", "cpo"])
@pytest.mark.parametrize("model", ["full", "new LoRA"])
def test_two_ranks_end_with_the_losses_and_weights_of_two_of_trl(tmp_path, case, model):
    """DDP and FSDP; the divergence of KTO is that of both ranks."""
    rows, options, trainer, their_options = CASES[case]
    make, ref, more = MODELS[model]
    if case not in COMPARED:
        ref, more = None, {}
    if case in ("orpo", "cpo"):
        rows = EVEN
    options = options | more | {"rows": rows, "model": make, "shuffle": False, "batch_size": 3}
    if case == "kto":
        options |= {"rotate_in": 3}  # TRL's answers go around in the rows of one rank's batch
    given = {"per_device_train_batch_size": 3, "ddp_backend": "gloo"} | their_options
    expected = run_ranks(lambda: theirs(trainer, rows, make, ref, **given))[0]

    for name, strategy in {"ddp": list, "fsdp": lambda: [Fsdp()]}.items():
        for size in (1, 3):
            asked = options | {"microbatch_size": size}
            folder = tmp_path / f"{name}{size}"
            found = run_ranks(lambda: trained(folder, *strategy(), **asked))[0]
            require_equal(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["orpo", "cpo"])
def test_uneven_answers_weigh_as_in_one_process(tmp_path, case):
    """Two ranks end with the weights of one, which are those of TRL's one, but not of its two."""
    rows, options, trainer, their_options = CASES[case]
    given = options | {"rows": rows, "shuffle": False}
    two = {"per_device_train_batch_size": 3, "ddp_backend": "gloo"} | their_options
    one_of_trl = theirs(trainer, rows, **their_options)
    require_equal(trained(tmp_path / "one", **given), one_of_trl)

    found = run_ranks(lambda: trained(tmp_path / "two", batch_size=3, **given))[0]

    require_equal(found, one_of_trl)
    two_of_trl = run_ranks(lambda: theirs(trainer, rows, **two))[0]
    with pytest.raises(AssertionError):
        require_equal(two_of_trl, one_of_trl)


def test_the_reference_is_seen(tmp_path):
    """Control: with another one the weights are others."""
    expected = theirs("DPO", PAIRS, llama, other)

    actual = trained(tmp_path, rows=PAIRS, shuffle=False)

    with pytest.raises(AssertionError):
        require_equal(actual, expected)
