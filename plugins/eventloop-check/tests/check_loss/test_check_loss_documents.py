"""Documents in a pack: what one sees of another is found, with the factor it is wrong by."""

# B = batch, T = position, V = token, C = channel

import pytest
import torch
from loss_cases import TinyText, number, text_task, token_mean
from torch import nn

from eventloop_check.check_loss.documents import NotPackedError, Pack

LENGTHS = (5, 2, 4)


def pack(*, first_counts=False):
    """Three documents in one sequence; the first label of each doesn't count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 11, (1, sum(LENGTHS)), generator=generator)
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    labels = ids if first_counts else ids.where(places > 0, -100)
    return {"input_ids": ids, "position_ids": places, "labels": labels}


class Packed(nn.Module):
    """Adds the mean of all tokens so far; of the same document, where it tells them apart."""

    def __init__(self, tells_apart):
        super().__init__()
        self.text, self.tells_apart = TinyText(token_mean), tells_apart

    def forward(self, input_ids, position_ids, labels):
        documents_BT = (position_ids == 0).cumsum(1)
        length = input_ids.shape[1]
        seen_BTT = torch.ones(length, length, device=input_ids.device).tril()[None]
        if self.tells_apart:
            seen_BTT = seen_BTT * (documents_BT[:, :, None] == documents_BT[:, None])
        tokens_BTC = self.text.tokens(input_ids)
        mixed_BTC = (seen_BTT / seen_BTT.sum(2, keepdim=True)) @ tokens_BTC
        logits_BTV = self.text.head(tokens_BTC + mixed_BTC)
        return {"logits": logits_BTV, "loss": token_mean(logits_BTV, labels)}


def expected(model, batch):
    wrong, right = (model(**one)["loss"] for one in (Pack.of(batch).reversed(), batch))
    return number(wrong / right)


def test_documents_that_are_told_apart_may_have_any_order(checked):
    """One pack is one sample: of other laws, that of padding alone can be tried."""
    report = checked(lambda: text_task(Packed(True), pack()))

    held = {name for name, result in report.results.items() if result == "holds"}
    assert held == {"documents", "padded", "content"}
    assert report.differing == set()
    assert report.found.succeeds


def test_attention_across_documents(checked):
    """What transformers' models do in a forward pass with a cache, which is their default."""
    report = checked(lambda: text_task(Packed(False), pack()))

    assert report.factor("documents") == pytest.approx(expected(Packed(False), pack()), rel=1e-5)
    assert report.causes == {"documents"}
    assert report.row("documents").update.same_outputs is False
    assert not report.found.succeeds


def test_a_document_that_is_predicted_from_the_one_before(checked):
    """pytorch/torchtitan#4075: the first token of each has a label."""
    batch = pack(first_counts=True)

    report = checked(lambda: text_task(Packed(True), batch))

    assert report.factor("documents") == pytest.approx(expected(Packed(True), batch), rel=1e-5)
    assert report.causes == {"labels"}
    assert report.row("documents").update.same_outputs is True


def test_documents_are_reversed_whole():
    """With what belongs to each of their tokens, and back again."""
    batch = {**pack(), "name": "a", "weights": torch.arange(11.0)[None]}

    found = Pack.of(batch).reversed()

    assert found["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]
    assert found["weights"][0].tolist() == [7, 8, 9, 10, 5, 6, 0, 1, 2, 3, 4]
    assert found["name"] == "a"
    (restored,) = Pack.of(batch).restored([found["weights"][0]])
    assert restored.tolist() == [*range(11)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2)), "no position_ids"),
        ({"position_ids": torch.arange(4)[None]}, "one document"),
        (
            {
                "position_ids": torch.tensor([[0, 0, 1]]),
                "attention_mask": torch.tensor([[0, 1, 1]]),
            },
            "padded",
        ),
        ({**pack(), "cu_seqlens": torch.tensor([0, 5, 7, 11])}, "'cu_seqlens'"),
    ],
)
def test_a_batch_of_something_else_is_left_alone(batch, message):
    """With the reason."""
    with pytest.raises(NotPackedError, match=message):
        Pack.of(batch)
