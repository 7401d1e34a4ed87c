"""Losses of samples that depend on others, and on chance: each is found, with its factor."""

# B = batch, T = position, V = token or class, C = channel

import pytest
import torch
from loss_cases import TinyText, linear, number, rank_parts, samples_task, text_batch, text_task
from torch import nn
from torch.nn import functional as F

from eventloop import hookimpl


@pytest.mark.nightly
def test_labels_that_are_shifted_across_samples(checked):
    """pytorch/torchtitan#4075: the last token of a document is made to predict the first of the next."""

    def across(logits_BTV, labels_BT):
        return F.cross_entropy(logits_BTV.flatten(0, 1)[:-1], labels_BT.flatten()[1:])

    report = checked(lambda: text_task(TinyText(across)))

    model, batch = TinyText(across), text_batch()
    logits_BTV, labels_BT = model(**batch)["logits"], batch["labels"]
    whole = across(logits_BTV, labels_BT)
    alone = (
        sum(across(*(one[idx : idx + 1] for one in (logits_BTV, labels_BT))) for idx in range(4))
        / 4
    )
    assert report.factor("microbatch-1") == pytest.approx(number(alone / whole), rel=1e-5)
    assert report.factor("reversed") == pytest.approx(
        number(across(logits_BTV.flip(0), labels_BT.flip(0)) / whole), rel=1e-5
    )
    assert report.row("reversed").cause.kind == "neighbours"


class Doubles:
    """Transforms each batch, as augmentations do."""

    name = "doubles"

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state):
        state.inputs = 2 * state.inputs


@pytest.mark.nightly
def test_a_batch_that_is_transformed_is_transformed_once(checked):
    """On each rank, too: the batch of the check is that of the data loader."""
    plain = checked(lambda: samples_task(linear(), F.cross_entropy))
    doubled = checked(lambda: samples_task(linear(), F.cross_entropy, algorithms=[Doubles()]))

    assert doubled.differing == set()
    assert doubled.results["ranks"] == "holds"
    assert doubled.found.whole.updates[0].loss != plain.found.whole.updates[0].loss


def test_batch_norm_in_training_mode(checked):
    """Its outputs for a sample depend on those beside it, on each rank for itself."""

    def model():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(3, 3)
        )

    report = checked(lambda: samples_task(model(), F.cross_entropy))
    synced = checked(lambda: samples_task(model(), F.cross_entropy), sync_batch_norm=True)

    (inputs, targets) = samples_task(linear(), None).train_dataloader[0]
    net = model()
    whole = F.cross_entropy(net(inputs), targets)
    alone = sum(F.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1]) for i in range(5)) / 5
    assert report.factor("microbatch-1") == pytest.approx(number(alone / whole), rel=1e-5)
    assert report.differing == {"microbatch-1", "microbatch-3", "ranks"}
    assert report.causes == {"batch norm"}
    assert synced.results["ranks"] == "holds"


def test_in_batch_negatives(checked):
    """huggingface/sentence-transformers#2916: one pair has nothing to be told from, and a loss of 0."""

    def contrastive(outputs, targets):
        similar = F.normalize(outputs) @ F.normalize(outputs.roll(1, 1)).T
        return F.cross_entropy(similar / 0.1, torch.arange(len(outputs), device=outputs.device))

    report = checked(lambda: samples_task(linear(), contrastive))

    (inputs, _) = samples_task(linear(), None).train_dataloader[0]
    outputs = linear()(inputs)
    first, second = rank_parts(outputs)
    wrong = (3 * contrastive(first, None) + 2 * contrastive(second, None)) / 5
    assert report.factor("microbatch-1") == 0.0
    assert report.gradient_factor("microbatch-1") == 0.0
    assert report.factor("ranks") == pytest.approx(
        number(wrong / contrastive(outputs, None)), rel=1e-5
    )
    assert report.results["reversed"] == "holds"
    assert report.causes == {"pairs"}


class Average(nn.Module):
    """Subtracts a running average, which every sample moves before the next one is seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, inputs):
        found = []
        for row in inputs:
            self.average = 0.5 * self.average + 0.5 * row
            found.append(row - self.average)
        return self.head(torch.stack(found))


@pytest.mark.nightly
def test_a_running_average_inside_the_forward_pass(checked):
    """What a sample gives depends on those before it: another order is another loss."""
    report = checked(lambda: samples_task(Average(), F.cross_entropy))

    (inputs, targets) = samples_task(linear(), None).train_dataloader[0]
    whole = F.cross_entropy(Average()(inputs), targets)
    wrong = F.cross_entropy(Average()(inputs.flip(0)), targets.flip(0))
    assert report.factor("reversed") == pytest.approx(number(wrong / whole), rel=1e-5)
    assert {"reversed", "ranks"} <= report.differing
    assert report.causes == {"kept state"}


class Dropped(nn.Module):
    """Drops inputs out, by a function that no module shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.head(F.dropout(inputs, 0.5, self.training))


@pytest.mark.nightly
def test_dropout_would_make_a_right_loss_differ_and_is_off(checked):
    """Microbatches draw other masks than the whole; the comparison would be of them."""
    (inputs, targets) = samples_task(linear(), None).train_dataloader[0]
    torch.manual_seed(0)
    net = Dropped()
    whole = F.cross_entropy(net(inputs), targets)
    alone = sum(F.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1]) for i in range(5)) / 5

    report = checked(lambda: samples_task(Dropped(), F.cross_entropy))

    assert abs(alone / whole - 1) > 0.01
    assert set(report.results.values()) <= {"holds", "not tried"}
    assert report.found.succeeds
    (place,) = report.found.whole.dropouts
    assert place.startswith("test_check_loss_dependence.py, line ")


class Noisy(nn.Module):
    """Scales its outputs by a number that it draws."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(3, 3)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, inputs):
        return self.head(inputs) * torch.rand((), generator=self.generator)


@pytest.mark.nightly
def test_other_random_numbers_can_not_be_made_equal_and_are_told(checked):
    """What the other laws would say about them is left out; the law of random numbers is broken."""
    generator = torch.Generator().manual_seed(7)
    first, second = (torch.rand((), generator=generator) for _ in range(2))

    report = checked(lambda: samples_task(Noisy(), lambda out, to: out.square().mean()))

    assert report.factor("draws") == pytest.approx(number((second / first) ** 2), rel=1e-5)
    assert report.gradient_factor("draws") == pytest.approx(number((second / first) ** 2), rel=1e-4)
    assert report.causes == {"random"}
    assert "torch's rand at test_check_loss_dependence.py" in report.found.whole.draws[0]
    assert report.results["microbatch-1"] == "not tried"
    assert not report.found.succeeds
