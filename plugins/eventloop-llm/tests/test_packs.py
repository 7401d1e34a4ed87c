"""Packs: whole documents, little room left, rows of which a model sees each document by itself."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from eventloop_llm.packing import OpenPacks, PackBatch, PackedDataset, best_fit, document_mask

LENGTHS = torch.randn(2_000, generator=torch.Generator().manual_seed(0)).mul(0.8).add(4).exp()
LENGTHS = LENGTHS.int().clamp(1, 512).tolist()
IGNORED = -100


def used(packs, lengths, max_tokens):
    return sum(lengths) / (len(packs) * max_tokens)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
def test_each_document_is_in_one_pack(lengths, max_tokens):
    """Whole, and no pack is over full."""
    packs = best_fit(lengths, max_tokens)

    assert sorted(idx for pack in packs for idx in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[idx] for idx in pack) <= max_tokens for pack in packs)
    assert all(pack == sorted(pack) for pack in packs)


def test_little_room_is_left():
    """One after the other into rows, a fifth would be empty; a document a row, six in seven."""
    in_order = sum(1 for _ in by_order(LENGTHS, 512))

    assert used(best_fit(LENGTHS, 512), LENGTHS, 512) > 0.99
    assert used([0] * in_order, LENGTHS, 512) < 0.95
    assert used(LENGTHS, LENGTHS, 512) < 0.2


def by_order(lengths, max_tokens):
    """Packs as rows are filled without looking ahead."""
    room = 0
    for length in lengths:
        if length > room:
            room = max_tokens
            yield length
        room -= length


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90), st.integers(1, 8))
def test_a_stream_is_packed_with_few_packs_open(lengths, max_tokens, num_open):
    """Each document once, whenever its pack is closed; what is kept is no more than was said."""
    packs, closed = OpenPacks(max_tokens, num_open), []
    for length in lengths:
        closed += packs.add(length, length)
        assert len(packs.state_dict()) <= num_open
    closed += packs.close()

    assert sorted(length for pack in closed for length in pack) == sorted(lengths)
    assert all(0 < sum(pack) <= max_tokens for pack in closed)
    assert packs.close() == []


def test_more_open_packs_leave_less_room():
    """With 64 a stream is packed nearly as well as what is known beforehand."""
    filled = {}
    for num_open in (1, 64):
        packs, closed = OpenPacks(512, num_open), []
        for length in LENGTHS:
            closed += packs.add(length, length)
        filled[num_open] = used(closed + packs.close(), LENGTHS, 512)

    assert filled[64] > 0.98 > 0.95 > filled[1]


def test_a_batch_has_what_tells_documents_apart():
    """Positions start over, first tokens have no label, rows are filled with what counts for nothing."""
    packs = [[[5, 6, 7], {"input_ids": [8, 9], "labels": [8, IGNORED]}], [torch.tensor([4, 3])]]

    batch = PackBatch(pad_id=1, length=6, document_ids=True)(packs)

    assert {name: one.tolist() for name, one in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 1], [4, 3, 1, 1, 1, 1]],
        "labels": [[IGNORED, 6, 7, IGNORED, IGNORED, IGNORED], [IGNORED, 3, *[IGNORED] * 4]],
        "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]],
        "document_ids": [[0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1]],
    }
    assert PackBatch()(packs)["input_ids"].shape == (2, 5)
    assert "document_ids" not in PackBatch()(packs)


def test_a_mask_keeps_documents_apart():
    """Attention over a pack is that over each of its documents; no row of it is empty."""
    packs = [[[1] * 5, [2] * 3], [[3] * 4]]
    ids_BT = PackBatch(length=10, document_ids=True)(packs)["document_ids"]
    mask_B1TT = document_mask(ids_BT)
    query, key, value = torch.randn(3, 2, 1, 10, 4, generator=torch.Generator().manual_seed(0))

    found = scaled_dot_product_attention(query, key, value, attn_mask=mask_B1TT)

    assert mask_B1TT.any(-1).all()
    for row, at in ((0, slice(0, 5)), (0, slice(5, 8)), (1, slice(0, 4))):
        parts = (one[row, :, at] for one in (query, key, value))
        expected = scaled_dot_product_attention(*parts, is_causal=True)
        torch.testing.assert_close(found[row, :, at], expected)


def test_a_model_of_transformers_sees_each_document_by_itself():
    """Its loss over packs is the mean over all tokens of all documents."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers)).eval()
    documents = [torch.randint(32, (num,)) for num in (9, 3, 12, 5, 7)]
    packs = PackedDataset(documents, 16)

    with torch.no_grad():
        packed = model(**PackBatch(length=16)([*packs]), use_cache=False).loss
        losses = [
            cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="sum")
            for one in documents
        ]
        joined = torch.cat(documents)[None]
        apart = model(joined, labels=joined).loss

    expected = sum(losses) / sum(len(one) - 1 for one in documents)
    torch.testing.assert_close(packed, expected)
    assert not torch.allclose(apart, expected, atol=1e-4)


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_bert_keeps_documents_apart_by_the_mask(is_masked):
    """The loss of one document has no gradient in the embeddings of another; without it, it has."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(**sizes, **layers)).eval()
    batch = PackBatch(document_ids=True)([[torch.randint(32, (5,)), torch.randint(32, (4,))]])
    mask = document_mask(batch.pop("document_ids"), is_causal=False) if is_masked else None
    batch["labels"][:, :5] = IGNORED  # what is left are the second document's
    embeddings_BTD = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()

    model(inputs_embeds=embeddings_BTD, attention_mask=mask, **batch).loss.backward()

    assert bool(embeddings_BTD.grad[:, :5].any()) is not is_masked
    assert embeddings_BTD.grad[:, 5:].any()


def test_a_data_set_of_packs_says_how_full_they_are():
    """Its samples are lists of documents; lengths that are known needn't be read."""

    class Read(list):
        def __getitem__(self, idx):
            raise AssertionError("read")

    packs = PackedDataset([[1] * 3, [2] * 5, [3] * 2], 8)

    assert [*packs] == [[[1] * 3, [2] * 5], [[3] * 2]]
    assert packs.used_frac == 10 / 16
    assert len(PackedDataset(Read("abc"), 8, lengths=torch.tensor([3, 5, 2]))) == 2


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (
            lambda: best_fit([3, 9], 8),
            "document 1 has 9 tokens, and a pack takes 1 to max_tokens=8",
        ),
        (lambda: best_fit([0], 8), "document 0 has 0 tokens"),
        (lambda: PackedDataset([], 8), "0 lengths for 0 documents"),
        (lambda: PackedDataset([[1]], 8, lengths=[1, 1]), "2 lengths for 1 documents"),
        (lambda: PackBatch(length=2)([[[1, 2, 3]]]), "a pack has 3 tokens, more than length=2"),
        (lambda: PackBatch()([[{"input_ids": [1], "ids": [1]}]]), "a document has ['ids']"),
        (
            lambda: PackBatch()([[{"input_ids": [1, 2], "labels": [1]}]]),
            "a document has 2 input_ids and 1 labels",
        ),
    ],
)
def test_what_can_not_be_packed_is_an_error(make, shown):
    """With what was found, and what to do."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        make()
