"""Tasks written from the documents alone, as a new user would: their numbers are true, and they resume.

Each has a plain loop beside it, which trains in the same way and adds its numbers up in float64. What is
logged, and what evaluation says, is equal to that: in one piece and in microbatches, in one go and after
a kill in mid-epoch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, hookimpl
from eventloop.data import cycled, zipped
from eventloop_jsonl import Jsonl
from eventloop_testing import Dies, differences, fit_and_die, isolated_trainer, last_checkpoint

BATCH_SIZE, NUM_EPOCHS, NUM_BATCHES, KILLED_AT = 8, 2, 6, 3
Numbers = dict[str, float]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """What a new user writes, and the same by hand.

    Args:
        task: makes the task.
        model, optimizer: make what the task's do.
        epochs: yields the batches of each epoch.
        loss: of a part of a batch, and what it logs.
        evaluated: the numbers of an evaluation, by a model in float64, of all samples at once.
        part: takes rows of a batch.
        size, weight: of a batch: its samples, and what it weighs, if that is something else.
    """

    task: Callable[[], Task]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    epochs: Callable[[], Iterator[Any]]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Mapping[str, Tensor]]]
    evaluated: Callable[[nn.Module], Numbers]
    part: Callable[[Any, slice], Any]
    size: Callable[[Any], int]
    weight: Callable[[Any], float] | None = None


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01)


# 1. A variational autoencoder, whose forward logs the two terms of its loss.

IMAGES, OTHER_IMAGES = drawn(28, 12).sigmoid(), drawn(20, 12, seed=1).sigmoid()


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 6)
        self.decoder = nn.Linear(3, 12)

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def vae_terms(outputs, images):
    decoded, mean, log_variance = outputs
    likeness = binary_cross_entropy_with_logits(decoded, images, reduction="none").sum(1).mean()
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return likeness, divergence


def vae_loader(images=IMAGES, *, shuffle=True):
    return DataLoader(TensorDataset(images), BATCH_SIZE, shuffle=shuffle)


def vae_task():
    def forward(model, batch, state):
        (images,) = batch
        likeness, divergence = vae_terms(model(images), images)
        state.log("vae/likeness", likeness)
        state.log("vae/divergence", divergence)
        return {"loss": likeness + divergence}

    return Task(
        model=Vae,
        forward=forward,
        train_dataloader=vae_loader(),
        eval_dataloaders={"valid": vae_loader(OTHER_IMAGES, shuffle=False)},
        optimizer=adamw,
    )


def vae_loss(model, batch):
    likeness, divergence = vae_terms(model(batch[0]), batch[0])
    return likeness + divergence, {"vae/likeness": likeness, "vae/divergence": divergence}


def vae_evaluated(model):
    likeness, divergence = vae_terms(model(OTHER_IMAGES.double()), OTHER_IMAGES.double())
    return {
        "valid/loss": (likeness + divergence).item(),
        "valid/vae/likeness": likeness.item(),
        "valid/vae/divergence": divergence.item(),
    }


# 2. A transformer with its own loss: a mean over the tokens that aren't padding.

TEXTS, OTHER_TEXTS = (
    torch.randint(10, (num, 7), generator=torch.Generator().manual_seed(num)) for num in (28, 20)
)
for texts in (TEXTS, OTHER_TEXTS):
    for row, text in enumerate(texts):
        text[3 + row % 5 :] = -1  # sequences of three tokens and more


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, texts):
        inputs, targets = texts[:, :-1].clamp(min=0), texts[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        mask = mask.to(self.head.weight.dtype)
        logits = self.head(self.layer(self.embed(inputs), src_mask=mask, is_causal=True))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return {"loss": loss, "logits": logits}


def num_targets(texts):
    return int((texts[:, 1:] >= 0).sum())


def texts_of(texts, *, shuffle=True):
    return DataLoader(TensorDataset(texts), BATCH_SIZE, shuffle=shuffle)


def transformer_task():
    return Task(
        model=Transformer,
        forward=lambda model, batch: model(batch[0]),
        train_dataloader=texts_of(TEXTS),
        eval_dataloaders={"valid": texts_of(OTHER_TEXTS, shuffle=False)},
        optimizer=adamw,
        num_tokens=lambda batch: num_targets(batch[0]),
        loss_weight=lambda batch: num_targets(batch[0]),
    )


def transformer_evaluated(model):
    return {"valid/loss": model(OTHER_TEXTS)["loss"].item()}


# 3. Two loaders zipped: labelled samples, and unlabelled ones that never run out.

LABELLED = TensorDataset(drawn(20, 4), torch.arange(20) % 3)
UNLABELLED = TensorDataset(drawn(44, 4, seed=1))


def both():
    return zipped(
        labelled=DataLoader(LABELLED, BATCH_SIZE, drop_last=True),
        unlabelled=cycled(DataLoader(UNLABELLED, BATCH_SIZE, drop_last=True)),
    )


def both_by_hand():
    """Yields the batches of each epoch: the unlabelled go on where they were."""
    unlabelled = (
        one for _ in range(9) for one in DataLoader(UNLABELLED, BATCH_SIZE, drop_last=True)
    )
    while True:
        labelled = DataLoader(LABELLED, BATCH_SIZE, drop_last=True)
        yield [{"labelled": one, "unlabelled": next(unlabelled)} for one in labelled]


def both_terms(model, batch):
    inputs, targets = batch["labelled"]
    (others,) = batch["unlabelled"]
    known = cross_entropy(model(inputs), targets)
    sure = model(others).softmax(1).amax(1).mean()
    return known - 0.1 * sure, {"both/known": known, "both/sure": sure}


def part_of_both(batch, rows):
    return {name: [column[rows] for column in one] for name, one in batch.items()}


def zipped_task():
    def forward(model, batch, state):
        loss, numbers = both_terms(model, batch)
        for name, number in numbers.items():
            state.log(name, number)
        return {"loss": loss}

    return Task(
        model=lambda: nn.Linear(4, 3),
        forward=forward,
        train_dataloader=both(),
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
    )


# 4. A table: a batch is a mapping, with numbers, categories and labels.

TABLE = {
    "numbers": drawn(28, 4),
    "categories": torch.randint(5, (28, 2), generator=torch.Generator().manual_seed(3)),
    "labels": torch.arange(28) % 3,
}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(TABLE["labels"])

    def __getitem__(self, idx):
        return {name: column[idx] for name, column in TABLE.items()}


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(4 + 6, 3)

    def forward(self, numbers, categories, labels=None):
        return self.head(torch.cat([numbers, self.embed(categories).flatten(1)], 1))


def table_task():
    def loss(outputs, labels):
        return cross_entropy(outputs, labels)

    def forward(model, batch, state):
        outputs = model(**batch)
        state.log("table/spread", outputs.amax(1).mean())
        return outputs

    return Task(
        model=Tabular,
        forward=forward,
        loss=loss,
        train_dataloader=DataLoader(Rows(), BATCH_SIZE, shuffle=True),
        eval_dataloaders={"test": DataLoader(Rows(), BATCH_SIZE)},
        optimizer=adamw,
        metrics={"accuracy": MulticlassAccuracy(3, average="micro")},
    )


def table_loss(model, batch):
    outputs = model(**batch)
    return cross_entropy(outputs, batch["labels"]), {"table/spread": outputs.amax(1).mean()}


def table_evaluated(model):
    outputs = model(TABLE["numbers"].double(), TABLE["categories"])
    return {
        "test/loss": cross_entropy(outputs, TABLE["labels"]).item(),
        "test/accuracy": (outputs.argmax(1) == TABLE["labels"]).double().mean().item(),
        "test/table/spread": outputs.amax(1).mean().item(),
    }


# 5. PPO: drives a world of its own for a while, then learns from the drive in minibatches.


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, seen):
        return self.actor(seen), self.critic(seen).squeeze(1)


class World:
    """Points that drift; the right action is the sign of their sum."""

    def __init__(self):
        self.places = torch.zeros(16, 3)

    def drive(self, model, generator):
        """Returns what was seen, done, how likely it was, and what it earned."""
        rows = []
        for _ in range(2):
            self.places = 0.5 * self.places + torch.randn(16, 3, generator=generator)
            with torch.no_grad():
                chances = model(self.places)[0].softmax(1)
            done = torch.multinomial(chances, 1, generator=generator)
            earned = (done.squeeze(1) == (self.places.sum(1) > 0)).float()
            rows.append((self.places, done, chances.gather(1, done).log(), earned))
        names = ("seen", "done", "likely", "earned")
        return {
            name: torch.cat(one) for name, one in zip(names, zip(*rows, strict=True), strict=True)
        }


def ppo_terms(model, rows):
    logits, values = model(rows["seen"])
    ratio = (logits.log_softmax(1).gather(1, rows["done"]) - rows["likely"]).exp().squeeze(1)
    gain = rows["earned"] - values.detach()
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return policy, mse_loss(values, rows["earned"])


class Ppo:
    """Owns the batch: a drive, and two rounds of minibatches."""

    def __init__(self):
        self.world = World()

    @hookimpl
    def train_batch(self, state):
        generator = state.generator("ppo")
        rows = self.world.drive(state.model, generator)
        state.log("ppo/earned", rows["earned"].mean())
        for _ in range(2):
            for chosen in torch.randperm(32, generator=generator).split(BATCH_SIZE):
                state.batch = {name: one[chosen] for name, one in rows.items()}
                stepped = state.update(self.minibatch_loss)
        return stepped

    def minibatch_loss(self, state):
        policy, value = ppo_terms(state.model, state.microbatch)
        state.log("ppo/policy", policy)
        state.log("ppo/value", value)
        return policy + value

    def state_dict(self):
        return {"places": self.world.places}

    def load_state_dict(self, state, version):
        self.world.places = state["places"].clone()


SEEN = drawn(20, 3)


def ppo_task():
    return Task(
        model=ActorCritic,
        forward=lambda model, inputs: model(inputs)[0],
        optimizer=adamw,
        eval_dataloaders={"test": DataLoader(TensorDataset(SEEN, (SEEN.sum(1) > 0).long()), 8)},
        metrics={"accuracy": MulticlassAccuracy(2, average="micro")},
        num_samples=lambda batch: len(batch["seen"]) if "seen" in batch else 32,
        algorithms=[Ppo()],
    )


def ppo_evaluated(model):
    right = model(SEEN.to(model.critic.weight.dtype))[0].argmax(1) == (SEEN.sum(1) > 0)
    return {"test/accuracy": right.double().mean().item()}


# The loops by hand.


def epochs(loader):
    """Yields the epochs of a data loader, each its batches."""
    while True:
        yield loader


CASES = {
    "vae": Case(
        vae_task, Vae, adamw, lambda: epochs(vae_loader()), vae_loss, vae_evaluated,
        part=lambda batch, rows: [batch[0][rows]], size=lambda batch: len(batch[0]),
    ),
    "transformer": Case(
        transformer_task, Transformer, adamw, lambda: epochs(texts_of(TEXTS)),
        lambda model, batch: (model(batch[0])["loss"], {}), transformer_evaluated,
        part=lambda batch, rows: [batch[0][rows]], size=lambda batch: len(batch[0]),
        weight=lambda batch: num_targets(batch[0]),
    ),
    "zipped": Case(
        zipped_task, lambda: nn.Linear(4, 3), lambda model: SGD(model.parameters(), lr=0.1),
        both_by_hand, both_terms, lambda model: {}, part=part_of_both,
        size=lambda batch: len(batch["labelled"][0]),
    ),
    "table": Case(
        table_task, Tabular, adamw,
        lambda: epochs(DataLoader(Rows(), BATCH_SIZE, shuffle=True)), table_loss, table_evaluated,
        part=lambda batch, rows: {name: one[rows] for name, one in batch.items()},
        size=lambda batch: len(batch["labels"]),
    ),
}  # fmt: skip


class Means:
    """Adds up numbers of a batch in float64, each part by its weight."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weight = 0.0

    def add(self, numbers: Mapping[str, Tensor], weight: float) -> None:
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.double().item() * weight
        self.weight += weight

    def found(self) -> Numbers:
        return {name: total / self.weight for name, total in self.sums.items()}


def update(case: Case, model: nn.Module, optimizer: Any, batch: Any, num_parts: int) -> Numbers:
    """Makes a step of a batch in parts; returns its numbers."""
    size, means = case.size(batch), Means()
    length = -(-BATCH_SIZE // num_parts)
    parts = [case.part(batch, slice(at, at + length)) for at in range(0, size, length)]
    total = sum(map(case.weight or case.size, parts))
    for part in parts:
        weight = (case.weight or case.size)(part)
        loss, numbers = case.loss(model, part)
        (loss * (weight / total)).backward()
        means.add({"train/loss": loss, **numbers}, weight)
    optimizer.step()
    optimizer.zero_grad()
    return means.found()


def by_hand(case: Case, num_parts: int) -> dict[tuple[int, str], float]:
    """Trains in a plain loop; returns its numbers by batch and name."""
    torch.manual_seed(0)
    model = case.model()
    optimizer, source = case.optimizer(model), case.epochs()
    rows, done = {}, 0
    for _ in range(NUM_EPOCHS):
        for batch in next(source):
            numbers = update(case, model, optimizer, batch, num_parts)
            done += 1
            rows |= {(done, name): value for name, value in numbers.items()}
        with torch.no_grad():
            numbers = case.evaluated(copy.deepcopy(model).double().eval())
        rows |= {(done, name): value for name, value in numbers.items()}
    return rows


def ppo_by_hand(num_parts: int, generator: torch.Generator) -> dict[tuple[int, str], float]:
    """Trains an actor and its critic in a plain loop."""
    torch.manual_seed(0)
    world, model = World(), ActorCritic()
    optimizer, rows = adamw(model), {}

    def loss(model, part):
        policy, value = ppo_terms(model, part)
        return policy + value, {"ppo/policy": policy, "ppo/value": value}

    case = Case(
        ppo_task, ActorCritic, adamw, list, loss, ppo_evaluated,
        part=lambda batch, rows: {name: one[rows] for name, one in batch.items()},
        size=lambda batch: len(batch["seen"]),
    )  # fmt: skip
    for batch in range(1, NUM_BATCHES + 1):
        drive, found = world.drive(model, generator), []
        for _ in range(2):
            for chosen in torch.randperm(32, generator=generator).split(BATCH_SIZE):
                part = {name: one[chosen] for name, one in drive.items()}
                found.append(update(case, model, optimizer, part, num_parts))
        rows[batch, "ppo/earned"] = drive["earned"].double().mean().item()
        for name in found[0]:
            mean = sum(numbers[name] for numbers in found) / len(found)
            rows[batch, name.replace("train/loss", "train/loss.adamw")] = mean
        rows[batch, "train/loss"] = found[-1]["train/loss"]
        if batch % 2 == 0:
            for name, value in ppo_evaluated(model).items():
                rows[batch, name] = value
    return rows


def fit(folder: Path, dies: int | None, task: Callable[[], Task], **given: Any) -> None:
    """Trains with the task, saving every second batch; may die."""
    plugins = {"algorithms": [Dies(dies)], "callbacks": [Jsonl()]}
    settings = {"checkpoint_interval": "2ba", "log_interval": "1ba"} | given
    with isolated_trainer(folder, task(), **plugins, **settings) as trainer:
        trainer.fit()


def logged(folder: Path) -> dict[tuple[int, str], float]:
    """Returns what the run has logged, by batch and name; each once."""
    lines = map(json.loads, next(folder.rglob("metrics.jsonl")).read_text().splitlines())
    rows = [((line["batch"], line["name"]), line["value"]) for line in lines]
    assert len(rows) == len(dict(rows))
    return {key: value for key, value in rows if not key[1].startswith("lr")}


def compare(folder: Path, task: Callable[[], Task], expected: Any, **given: Any) -> None:
    """Trains in one go, and with a kill in mid-epoch; compares both with a loop by hand."""
    fit(folder / "one-go", None, task, **given)
    fit_and_die(fit, folder / "killed", KILLED_AT, task, **given)
    fit(folder / "killed", None, task, **given)

    found, resumed = logged(folder / "one-go"), logged(folder / "killed")
    assert {key: found.get(key) for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert resumed == found
    one, other = last_checkpoint(folder / "one-go"), last_checkpoint(folder / "killed")
    assert list(differences(one.parts, other.parts)) == []


@pytest.mark.sampled(16)
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_new_users_numbers_are_true_and_resume(name, num_parts, tmp_path):
    """What is logged in forward, and what evaluation says, in one piece and in microbatches."""
    case = CASES[name]
    size = {} if num_parts == 1 else {"microbatch_size": BATCH_SIZE // num_parts}

    compare(tmp_path, case.task, by_hand(case, num_parts), max_duration=f"{NUM_EPOCHS}ep", **size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_parts", [1, 4])
def test_an_agent_s_numbers_are_true_and_resume(num_parts, tmp_path):
    """Several updates a batch: of a number that each logs, the mean; the loss is that of the last."""
    size = {} if num_parts == 1 else {"microbatch_size": BATCH_SIZE // num_parts}
    with isolated_trainer(tmp_path / "aside", ppo_task(), max_duration="1ba") as trainer:
        generator = trainer.state.generator("ppo")
    given = {"max_duration": f"{NUM_BATCHES}ba", "eval_interval": "2ba", **size}

    compare(tmp_path, ppo_task, ppo_by_hand(num_parts, generator), **given)
