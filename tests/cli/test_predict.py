"""`eventloop predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from eventloop.cli.predict import concatenated
from eventloop.errors import TaskError


class Pair(NamedTuple):
    logits: torch.Tensor
    cache: object = None


@dataclass
class Record:
    logits: torch.Tensor


def test_outputs_are_written_for_every_eval_loader(run, tiny):
    """All batches of a loader become one tensor, in the order of the data."""
    ran = run("predict", "tiny.py", "--no-plugins")

    written = load_file("predictions.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {
        "test": (12, 3),
        "valid": (12, 3),
    }
    assert ran.out.splitlines()[-1] == "predictions.safetensors: test (12, 3), valid (12, 3)"


def test_one_loader_can_be_chosen(run, tiny):
    """And the file can be named."""
    run("predict", "tiny.py", "--no-plugins", "--dataloader", "valid", "--out", "v.safetensors")

    assert list(load_file("v.safetensors")) == ["valid"]


def test_a_loader_that_does_not_exist_is_refused_with_the_closest(run, tiny):
    """Nothing is written."""
    ran = run("predict", "tiny.py", "--no-plugins", "--dataloader", "tset")

    assert ran.status == 2
    assert "no eval data loader is named 'tset'; the closest is 'test'" in ran.err
    assert not (tiny / "predictions.safetensors").exists()


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        (lambda one: one, ["test"]),
        (lambda one: {"logits": one, "more": {"x": one}}, ["test.logits", "test.more.x"]),
        (lambda one: (one, None, [one]), ["test.0", "test.2.0"]),
        (Pair, ["test.logits"]),
        (Record, ["test.logits"]),
    ],
)
def test_nested_outputs_have_dotted_names(form, keys):
    """The format knows no nesting."""
    joined = concatenated("test", [form(torch.ones(2, 3)), form(torch.ones(1, 3))])

    assert list(joined) == keys
    assert all(tensor.shape == (3, 3) for tensor in joined.values())


def test_one_number_a_batch_becomes_a_vector():
    """A model may give its loss along with its logits."""
    joined = concatenated("test", [torch.tensor(1.0), torch.tensor(2.0)])

    assert joined["test"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("outputs", "shapes"),
    [
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            {"test[0]": (2, 3), "test[1]": (2, 4)},
        ),
        ([{"a": torch.ones(1)}, {"b": torch.ones(2)}], {"test.a[0]": (1,), "test.b[1]": (2,)}),
    ],
)
def test_outputs_of_other_shapes_stay_apart(outputs, shapes):
    """Sequences padded to the longest of their batch have no shape in common."""
    found = concatenated("test", outputs)

    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes


def test_outputs_that_are_no_tensors_are_refused():
    """Better than a file in which something is missing."""
    with pytest.raises(TaskError, match="is a str"):
        concatenated("test", ["text"])
