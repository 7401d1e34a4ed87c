"""From rows to tokens: which of them are trained on, and what is refused."""

from __future__ import annotations

import json
import re

import datasets
import pytest
import torch
from sft_cases import CHATS, MARKED, TEMPLATE, chat, llama, tokenizer, turn

from eventloop import TaskError
from eventloop_llm.chats.documents import Documents, batches_of
from eventloop_llm.chats.rows import read_rows
from eventloop_llm.chats.tokens import Conversations, examples_of
from eventloop_llm.models.passes import model_inputs, token_log_probs
from eventloop_llm.packing import IGNORED

TWO_TURNS = [
    turn("system", "w0"), turn("user", "w1 w2"), turn("assistant", "w3 w4"), turn("user", "w5"),
    turn("assistant", "w6"),
]  # fmt: skip
# Renders what came before the last question otherwise once there is another.
SHORTENS = (
    "{% for message in messages %}{% if loop.last or message.role == 'user' %}"
    "<{{ message.role }}> {{ message.content }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def words(row, loss_on="auto", template=TEMPLATE):
    """Returns the words of a row, and those that are trained on."""
    made = tokenizer(template)
    found = Conversations(made, loss_on)(row)
    trained_on = [one for one in found.labels if one != IGNORED]
    assert len(found.labels) == len(found.input_ids)
    return made.decode(found.input_ids), made.decode(trained_on)


WHOLE = "<system> w0 <end> <user> w1 w2 <end> <assistant> w3 w4 <end> <user> w5 <end> <assistant> w6 <end>"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by rendering", "by its marks"])
@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("auto", "w3 w4 <end> w6 <end>"),
        ("assistant", "w3 w4 <end> w6 <end>"),
        ("completion", "w6 <end>"),
        ("all", WHOLE),
    ],
)
def test_what_of_a_chat_is_trained_on(loss_on, expected, template):
    """All that assistants say, with the token that ends it; or the last answer; or all."""
    assert words({"messages": TWO_TURNS}, loss_on, template) == (WHOLE, expected)


@pytest.mark.parametrize(
    ("row", "loss_on", "whole", "trained_on"),
    [
        ({"text": "w1 w2 "}, "auto", "w1 w2 <end>", "w1 w2 <end>"),
        ({"prompt": "w1 w2 ", "completion": "w3 "}, "auto", "w1 w2 w3 <end>", "w3 <end>"),
        ({"prompt": "w1 ", "completion": "w3 <end>"}, "completion", "w1 w3 <end>", "w3 <end>"),
        ({"prompt": "w1 ", "completion": "w3 "}, "all", "w1 w3 <end>", "w1 w3 <end>"),
        ({"prompt": TWO_TURNS[:4], "completion": TWO_TURNS[4:]}, "auto", WHOLE, "w6 <end>"),
        ({"prompt": TWO_TURNS[:4], "completion": TWO_TURNS[4:]}, "all", WHOLE, WHOLE),
        (
            {"prompt": TWO_TURNS[:4], "completion": TWO_TURNS[4:]}, "assistant", WHOLE,
            "w3 w4 <end> w6 <end>",
        ),
        ({"input_ids": [7, 8, 9]}, "auto", "w0 w1 w2", "w0 w1 w2"),
        ({"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}, "auto", "w0 w1 w2", "w1 w2"),
    ],
)  # fmt: skip
def test_what_of_other_rows_is_trained_on(row, loss_on, whole, trained_on):
    """A text ends with the tokenizer's end of text, a prompt is never trained on."""
    assert words(row, loss_on) == (whole, trained_on)


def test_bytes_and_characters_are_told_apart():
    """A byte-level tokenizer puts a space into the token after it; the answer begins there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    given = {"special_tokens": ["<end>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    bpe.train_from_iterator(
        ["ab ab äöü abc"] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False, **given)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", chat_template=TEMPLATE)
    messages = [turn("user", "ab äö"), turn("assistant", "äöü ab\nüü"), turn("user", "c")]
    messages.append(turn("assistant", "€ abc"))

    found = Conversations(made)({"messages": messages})

    labels = [one for one in found.labels if one != IGNORED]
    assert made.decode(labels) == " äöü ab\nüü <end> € abc <end> "


@pytest.mark.parametrize(
    ("row", "loss_on", "template", "shown"),
    [
        ({"words": "w1"}, "auto", TEMPLATE, "it has 'words'; give rows of messages"),
        ({"messages": TWO_TURNS[:2]}, "auto", TEMPLATE, "no message in it is an assistant's"),
        ({"messages": TWO_TURNS[:2]}, "auto", MARKED, "as its template marks them"),
        ({"messages": TWO_TURNS}, "auto", SHORTENS, "renders the chat up to message 2 otherwise"),
        (
            {"messages": TWO_TURNS},
            "auto",
            None,
            "no chat template; name a file with one, chat_template=FILE",
        ),
        ({"prompt": "w1", "completion": "w2"}, "assistant", TEMPLATE, "where no assistant speaks"),
    ],
)
def test_a_row_that_can_not_be_trained_on_is_named(row, loss_on, template, shown):
    """Before training, with its number."""
    with pytest.raises(TaskError, match=re.escape(shown)) as caught:
        examples_of([CHATS[0], row], "a.jsonl", Conversations(tokenizer(template), loss_on), 99)

    assert "row 1 of a.jsonl" in str(caught.value) or template is None


def test_long_rows_are_cut_and_those_without_a_label_left_out():
    """They would cost time and teach nothing."""
    rows = [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[1:3]}]
    conversations = Conversations(tokenizer())

    found, num_cut, num_left_out = examples_of(rows, "rows", conversations, 6)

    assert (num_cut, num_left_out) == (2, 1)
    assert [len(one.input_ids) for one in found] == [6]
    with pytest.raises(TaskError, match="no row of rows has a label in its first 3 tokens"):
        examples_of(rows, "rows", conversations, 3)


def test_rows_are_read_from_lines_parquet_and_folders(tmp_path):
    """The same rows; what a table fills with None is left out."""
    rows = [*CHATS[:3], {"messages": [turn("user", "w1") | {"name": "w2"}, turn("assistant", "w")]}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "a")

    for path in (lines, tmp_path / "a.parquet", tmp_path / "a"):
        assert read_rows(path) == (rows, path.name)
    assert read_rows(rows) == (rows, "data")


def test_what_is_no_data_is_refused(tmp_path):
    """With what to write."""
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (tmp_path / "a.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "folder").mkdir()
    sets = datasets.DatasetDict(train=datasets.Dataset.from_list(CHATS))
    sets.save_to_disk(tmp_path / "sets")
    for name, shown in {
        "bad.jsonl": "line 2 of bad.jsonl is not JSON",
        "a.txt": "a.txt is neither a .jsonl nor a .parquet file",
        "none.jsonl": "there is no ",
        "empty.jsonl": "empty.jsonl has no row",
        "list.jsonl": r"row 0 of list.jsonl is \[1\], not a mapping",
        "folder": "is not a folder of datasets",
        "sets": "has several sets: train",
    }.items():
        with pytest.raises(TaskError, match=shown):
            read_rows(tmp_path / name)


def test_what_is_said_in_a_batch_is_what_a_model_sees_alone():
    """Rows of a batch are padded or packed; log-probabilities are those of each row by itself."""
    model = llama().eval()
    made = [Conversations(tokenizer())(chat(seed, 2)) for seed in range(5)]
    documents = Documents(made)
    alone = [
        torch.log_softmax(model(input_ids=torch.tensor([one.input_ids])).logits[0], -1)
        for one in made
    ]
    expected = sorted(
        float(logs[at, label])
        for logs, one in zip(alone, made, strict=True)
        for at, label in enumerate(one.labels[1:])
        if label != IGNORED
    )

    for pack_into in (None, 64):
        loader = batches_of(documents, pad_id=0, batch_size=5, pack_into=pack_into)
        (batch,) = loader
        outputs = model(**model_inputs(model, batch))
        log_probs, is_counted = token_log_probs(outputs.logits, batch["labels"])
        actual = sorted(log_probs[is_counted].tolist())
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        assert len(batch["input_ids"]) == 5 if pack_into is None else len(batch["input_ids"]) < 5
