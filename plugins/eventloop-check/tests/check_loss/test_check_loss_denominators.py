"""Bugs of denominators, rebuilt as small tasks: each is found, with the factor it is wrong by."""

# B = batch, T = position, V = token or class, C = channel

from functools import partial

import pytest
import torch
from loss_cases import (
    LENGTHS,
    TinyText,
    linear,
    number,
    rank_parts,
    samples_task,
    text_batch,
    text_task,
    token_losses,
    token_mean,
    weighed,
)
from torch.nn import functional as F

from eventloop import hookimpl
from eventloop.data import Microbatches
from eventloop_check.check_loss.sequences import Sequences


def test_a_mean_over_tokens_with_their_weights_keeps_all_laws(checked):
    """What follows would show nothing if a right loss were found wrong."""
    report = checked(
        lambda: text_task(
            TinyText(token_mean),
            loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
        )
    )

    assert set(report.results.values()) == {"holds"}
    assert len(report.found.rows) == 7
    assert report.found.succeeds


def test_a_mean_over_samples_keeps_all_laws(checked):
    """In classes, without a word about weights."""
    report = checked(lambda: samples_task(linear(), F.cross_entropy))

    assert report.differing == set()
    assert {row.variant.law for row in report.found.rows if row.result == "not tried"} == {
        "padding"
    }
    assert report.found.succeeds


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("reduction", "differs"), [("mean", False), ("sum", True)])
def test_of_a_batch_in_parts_the_first_part_is_checked(checked, reduction, differs):
    """Nothing splits such a batch, but its parts are microbatches like any other."""

    def task():
        made = samples_task(linear(), partial(F.cross_entropy, reduction=reduction))
        (inputs, targets), *_ = made.train_dataloader
        parts = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
        made.train_dataloader = [Microbatches(parts)]
        return made

    report = checked(task)

    assert ("microbatch-1" in report.differing) == differs
    assert report.results["reversed"] == "holds"
    assert report.found.succeeds == (not differs)


@pytest.mark.nightly
def test_a_sample_without_labels_weighs_nothing(checked):
    """Its mean is NaN, alone in a microbatch; that of the batch isn't."""
    batch = text_batch()
    batch["labels"][1] = -100

    report = checked(
        lambda: weighed(
            TinyText(
                lambda logits, labels: F.cross_entropy(
                    logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                )
            ),
            batch=batch,
        )
    )

    assert report.results["microbatch-1"] == report.results["microbatch-3"] == "holds"
    assert report.results["ranks"] == "holds"


def test_a_weight_that_is_not_known_fails_the_parts_and_not_the_whole(checked):
    """The core refuses to guess, and its message is the reason of each row."""
    report = checked(lambda: text_task(TinyText(token_mean), loss_weight=None))

    assert report.results["reversed"] == "holds"
    for name in ("microbatch-1", "microbatch-3", "lengths", "ranks"):
        assert report.results[name] == "failed"
        assert "aren't known" in report.row(name).reason
    assert not report.found.succeeds


@pytest.mark.nightly
def test_a_mean_over_tokens_that_is_weighed_by_samples(checked):
    """huggingface/transformers#24725, fixed in #34191: the mean of the microbatches' means."""
    report = checked(lambda: text_task(TinyText(token_mean)))

    model, batch = TinyText(token_mean), text_batch()
    losses_BT = token_losses(model(**batch)["logits"], batch["labels"])
    nums_B = torch.tensor(LENGTHS) - 1
    right = losses_BT.sum() / nums_B.sum()
    wrong = (losses_BT.sum(1) / nums_B).mean()
    first, second = (
        a.sum() / b.sum() for a, b in zip(rank_parts(losses_BT), rank_parts(nums_B), strict=True)
    )
    wrong_grad, right_grad = (
        torch.cat(
            [
                one.flatten()
                for one in torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            ]
        )
        for loss in (wrong, right)
    )
    scale = (wrong_grad @ right_grad) / right_grad.square().sum()
    rest = (wrong_grad - scale * right_grad).norm() / wrong_grad.norm()
    on_ranks = (3 * first + second) / 4 / right
    compared = report.row("microbatch-1").update.compared
    assert compared.loss_factor == pytest.approx((wrong / right).item(), rel=1e-5)
    assert compared.scale == pytest.approx(scale.item(), rel=1e-4)
    assert compared.residual == pytest.approx(rest.item(), rel=1e-3)
    assert report.factor("ranks") == pytest.approx(on_ranks.item(), rel=1e-5)
    assert report.differing == {"microbatch-1", "microbatch-3", "lengths", "ranks"}
    assert report.causes == {"tokens"}
    assert "[:, 1:] != -100" in report.row("ranks").cause.fix


@pytest.mark.nightly
def test_a_mean_over_tokens_of_equal_lengths_is_found_by_cutting_them(checked):
    """The first batch may be full, and the next one not."""
    batch = text_batch()
    full = {name: one[:1].repeat(4, 1) for name, one in batch.items()}
    full["input_ids"] = torch.arange(32).reshape(4, 8) % 10 + 1
    full["labels"] = full["input_ids"].clone()

    report = checked(lambda: text_task(TinyText(token_mean), full))

    model, short = TinyText(token_mean), Sequences.of(full).short()
    losses_BT = token_losses(model(**short)["logits"], short["labels"])
    nums_B = (short["labels"][:, 1:] != -100).sum(1)
    wrong = (losses_BT.sum(1) / nums_B).mean() / (losses_BT.sum() / nums_B.sum())
    assert sorted(nums_B.tolist()) == [1, 2, 3, 5]
    assert report.differing == {"lengths"}
    assert report.factor("lengths") == pytest.approx(number(wrong), rel=1e-5)
    assert report.causes == {"tokens"}


@pytest.mark.nightly
def test_a_sum_without_a_denominator(checked):
    """EleutherAI/bergson#344: a sum over the batch, divided by the length of one sequence, or by nothing."""
    report = checked(
        lambda: text_task(TinyText(lambda logits, labels: token_losses(logits, labels).sum()))
    )

    model, batch = TinyText(None), text_batch()
    losses_BT = token_losses(model.head(model.tokens(batch["input_ids"])), batch["labels"])
    first, second = (one.sum() for one in rank_parts(losses_BT))
    unequal = number((3 * first + second) / 4 / losses_BT.sum())
    assert report.factor("microbatch-1") == pytest.approx(1 / 4, rel=1e-5)
    assert report.gradient_factor("microbatch-1") == pytest.approx(1 / 4, rel=1e-4)
    assert report.factor("microbatch-3") == pytest.approx(unequal, rel=1e-5)
    assert report.factor("ranks") == pytest.approx(unequal, rel=1e-5)
    assert report.causes == {"sum"}


class Divided:
    """Divides by the number of microbatches what the loop weighs already."""

    name = "divided"

    @hookimpl
    def after_loss(self, state):
        state.loss = state.loss / state.num_microbatches


def test_a_loss_that_is_divided_by_the_accumulation_steps_twice(checked):
    """huggingface/transformers#35210: the loop divides by the accumulation steps, the loss has done so."""
    report = checked(lambda: samples_task(linear(), F.cross_entropy, algorithms=[Divided()]))

    assert report.factor("microbatch-1") == pytest.approx(1 / 5, rel=1e-5)
    assert report.gradient_factor("microbatch-1") == pytest.approx(1 / 5, rel=1e-4)
    assert report.factor("microbatch-3") == pytest.approx(1 / 2, rel=1e-5)
    assert report.row("microbatch-3").update.compared.residual < 1e-4
    assert report.results["ranks"] == "holds"
    assert report.causes == {"divided"}


def test_a_mean_over_ranks_of_unequal_counts(checked):
    """pytorch/pytorch#37359: the plain mean over ranks, where one of them has fewer samples."""
    report = checked(lambda: samples_task(linear(), F.cross_entropy, loss_weight=lambda: 1.0))

    (inputs, targets) = samples_task(linear(), None).train_dataloader[0]
    losses_B = F.cross_entropy(linear()(inputs), targets, reduction="none")
    first, second = (one.mean() for one in rank_parts(losses_B))
    wrong = number((first + second) / 2 / losses_B.mean())
    assert report.factor("ranks") == pytest.approx(wrong, rel=1e-5)
    assert report.factor("microbatch-3") == pytest.approx(wrong, rel=1e-5)
    assert report.results["microbatch-1"] == "holds"
    assert report.causes == {"samples"}


def test_class_weights_that_are_normalised_in_each_microbatch(checked):
    """pytorch/pytorch#72047: cross_entropy(weight=...) divides by the weights of the targets it is given."""
    weights_V = torch.tensor([0.1, 1.0, 5.0])

    report = checked(
        lambda: samples_task(
            linear(), lambda out, to: F.cross_entropy(out, to, weight=weights_V.to(out.device))
        )
    )

    (inputs, targets) = samples_task(linear(), None).train_dataloader[0]
    losses_B, w_B = F.cross_entropy(linear()(inputs), targets, reduction="none"), weights_V[targets]
    right = (w_B * losses_B).sum() / w_B.sum()
    assert report.factor("microbatch-1") == pytest.approx(number(losses_B.mean() / right), rel=1e-5)
    assert report.differing == {"microbatch-1", "microbatch-3", "ranks"}
    assert report.causes == {"weights"}
