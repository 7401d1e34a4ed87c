"""Tiny models of text and of samples, from which tests make right and wrong losses."""

# B = batch, T = position, V = token, C = channel

import torch
from torch import nn
from torch.nn import functional as F

from eventloop import Task

LENGTHS = (8, 6, 3, 5)
NUM_TOKENS, WIDTH, LENGTH = 11, 6, 8


def text_batch(is_left=False):
    """Sequences of unequal lengths, padded with 0; labels are the tokens themselves, as transformers'.

    On the left, a sequence's first token has no label: what predicts it is padding.
    """
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(1, NUM_TOKENS, (len(LENGTHS), LENGTH), generator=generator)
    lengths_B, places_T = torch.tensor(LENGTHS)[:, None], torch.arange(LENGTH)
    real_BT = places_T >= LENGTH - lengths_B if is_left else places_T < lengths_B
    return {
        "input_ids": ids_BT * real_BT,
        "attention_mask": real_BT.long(),
        "labels": ids_BT.where(real_BT & (real_BT.roll(1, 1) | (not is_left)), -100),
    }


class TinyText(nn.Module):
    """Predicts each token from the one before it; `reduce` makes a loss of those of the tokens."""

    def __init__(self, reduce):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.head = nn.Embedding(NUM_TOKENS, WIDTH), nn.Linear(WIDTH, NUM_TOKENS)
        self.reduce = reduce

    def hidden(self, input_ids, attention_mask):
        return self.tokens(input_ids)

    def forward(self, input_ids, attention_mask, labels):
        logits_BTV = self.head(self.hidden(input_ids, attention_mask))
        return {"logits": logits_BTV, "loss": self.reduce(logits_BTV, labels)}


def token_losses(logits_BTV, labels_BT):
    """The loss of each token but the first, 0 where the label doesn't count."""
    return F.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), labels_BT[:, 1:], reduction="none")


def token_mean(logits_BTV, labels_BT):
    return token_losses(logits_BTV, labels_BT).sum() / (labels_BT[:, 1:] != -100).sum()


def text_task(model, batch=None, **given):
    """A task that says that its batches weigh what they have of samples, unless it says otherwise."""
    given.setdefault("loss_weight", lambda batch: len(batch["input_ids"]))
    return Task(
        model=model,
        train_dataloader=[text_batch() if batch is None else batch],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        **given,
    )


def weighed(model, **given):
    return text_task(
        model, loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(), **given
    )


def samples_task(model, loss, **given):
    """Five samples of three numbers, in three classes."""
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    return Task(
        model=model,
        loss=loss,
        train_dataloader=[(inputs, torch.tensor([0, 1, 2, 0, 0]))],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        **given,
    )


def linear():
    torch.manual_seed(3)
    return nn.Linear(3, 3)


def number(one):
    return one.item()


def rank_parts(tensor):
    """What two ranks get of five samples, or of four."""
    return tensor.split([3, len(tensor) - 3])
