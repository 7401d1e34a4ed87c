"""The losses and weights of TRL's SFTTrainer, on the same rows in the same order, in fp32."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from run_cases import trained_by_trl
from sft_cases import CHATS, COMPLETIONS, MARKED, MODELS, Losses, tokenizer, trained

from eventloop_fsdp import Fsdp
from eventloop_testing import run_ranks

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL isn't installed", allow_module_level=True)

NUM_ROWS = 12
# What is compared: rows, our options, TRL's.
DATA = {
    "assistant": (CHATS[:NUM_ROWS], {"loss_on": "assistant"}, {"assistant_only_loss": True}),
    "all": (CHATS[:NUM_ROWS], {"loss_on": "all"}, {}),
    "completion": (COMPLETIONS[:NUM_ROWS], {}, {}),
}
MICROBATCHES = {
    "whole": {},
    "1": {"microbatch_size": 1},
    "3": {"microbatch_size": 3},
    "3, sliced": {"settings": {"microbatch_size": 3}},
}
STRATEGIES = {"ddp": list, "fsdp": lambda: [Fsdp()]}


def theirs(data, model, packing, batch_size, **more):
    """Trains with TRL; returns the weights, and the loss of each step."""
    import trl

    rows, _, options = DATA[data]
    options = options | more | {"packing": packing, "per_device_train_batch_size": batch_size}
    return trained_by_trl(
        trl.SFTTrainer, trl.SFTConfig, rows, MODELS[model](), tokenizer(MARKED), **options
    )


def ours(folder, data, model, packing, batch_size, *plugins, **given):
    """Trains; returns the weights, whole, and the losses."""
    rows, options, _ = DATA[data]
    losses = Losses()
    settings = given.pop("settings", {}) | {"callbacks": [losses]}
    found = trained(
        folder, *plugins, rows=rows, model=MODELS[model], packing=packing, batch_size=batch_size,
        tokenizer=tokenizer(MARKED), shuffle=False, settings=settings, **options, **given,
    )  # fmt: skip
    return found, losses.found


def require_equal(actual, expected):
    for mine, trls in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, trls, rtol=0, atol=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_it_ends_with_the_losses_and_weights_of_trl(tmp_path, data, model, packing):
    """However a batch is cut. Packed, a batch has all rows: TRL has another order of them."""
    case = (data, model, packing, NUM_ROWS if packing else 6)
    expected = theirs(*case)

    for name, given in MICROBATCHES.items():
        require_equal(ours(tmp_path / name, *case, **given), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_end_with_the_losses_and_weights_of_two_of_trl(tmp_path, model):
    """Each has half of each batch, in which there are other numbers of labels."""
    case = ("assistant", model, False, 3)
    expected = run_ranks(lambda: theirs(*case, ddp_backend="gloo"))

    for name, strategy in STRATEGIES.items():
        for size in (1, 3):
            folder, given = tmp_path / f"{name}{size}", {"microbatch_size": size}
            found = run_ranks(lambda: ours(folder, *case, *strategy(), **given))
            require_equal(found[0], expected[0])


def test_what_microbatches_weigh_is_seen(tmp_path):
    """Control: weights by rows make another step."""
    case = ("assistant", "full", False, 6)

    def by_rows(task):
        task.loss_weight = lambda batch: len(batch["labels"])

    actual, _ = ours(tmp_path, *case, microbatch_size=3, change=by_rows)

    with pytest.raises(AssertionError):
        require_equal((actual,), theirs(*case)[:1])
