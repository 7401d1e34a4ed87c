"""Batches: nests, counts, and how they are taken from a loader."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop.data.batches import (
    describe,
    inputs_of,
    is_pair,
    map_tensors,
    mover_to,
    num_samples,
    targets_of,
    to_host,
    with_inputs,
    with_targets,
)
from eventloop.data.microbatch_splitting import split
from eventloop.errors import TaskError


class Pair(NamedTuple):
    inputs: object
    targets: object


class Triple(NamedTuple):
    image: object
    text: object
    label: object


class Movable:
    """What a tokenizer's BatchEncoding or a graph batch is: no tensor, but with a `to`."""

    def __init__(self, place="cpu"):
        self.place = place

    def to(self, place, non_blocking=False):
        return Movable(place)


X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


def test_mapping_keeps_the_shape_of_a_nest(nest):
    """A named tuple stays one, so that its fields go on working."""
    mapped = map_tensors(lambda tensor: tensor + 0, nest)

    assert type(mapped) is type(nest)
    assert repr(mapped) == repr(nest)


def test_what_is_no_tensor_stays_as_it_is():
    """File names and ids travel with the batch."""
    thing = object()

    assert map_tensors(lambda tensor: None, (thing, "name", 3, None)) == (thing, "name", 3, None)


def test_objects_with_a_method_to_are_moved():
    """Libraries have batches of their own."""
    moved = mover_to(torch.device("meta"))({"graph": Movable(), "x": X})

    assert (moved["graph"].place.type, moved["x"].device.type) == ("meta", "meta")


def test_on_the_host_nothing_is_moved():
    """Batches come from there, so that a step needn't look at them."""
    batch = (X, Y)

    assert mover_to(torch.device("cpu"))(batch) is batch


def test_a_copy_on_the_host_has_no_graph():
    """Predictions are kept for long."""
    weight = torch.ones(2, requires_grad=True)

    copied = to_host({"logits": X @ weight})

    assert not copied["logits"].requires_grad


def test_samples_are_counted_by_the_leading_dimension(nest):
    """Of every tensor that has one."""
    assert num_samples(nest) == num_samples({"scale": torch.tensor(2.0), "x": X}) == 5


@pytest.mark.parametrize(
    "batch",
    ["text", (), ([], []), {"a": 1}, torch.tensor(1.0), (torch.tensor(1.0),), np.ones((2, 3))],
)
def test_samples_that_can_not_be_counted_are_refused(batch):
    """A guess would bend every mean."""
    with pytest.raises(TaskError, match="holds no tensor whose samples could be counted"):
        num_samples(batch)


def image(height, num_boxes):
    return torch.zeros(3, height, 5), {"boxes": torch.zeros(num_boxes, 4), "image_id": height}


@pytest.mark.parametrize("targets", [Y, [Y, Y], (Y, Y)])
def test_several_inputs_are_no_samples(targets):
    """Control: each holds all samples."""
    assert num_samples(([X, X], targets)) == 5
    assert num_samples(((X[:2], X[:2]), Y[:2])) == 2
    assert [one.shape for one in split(((X[:2], X[:2]), Y[:2]), 1)[0][0]] == [(1, 2), (1, 2)]


SINGLE = {
    "scalar": (X[0], Y[0]),
    "number": (X[0], 3),
    "vector": (torch.zeros(8), torch.zeros(3)),
    "image": (torch.zeros(3, 4, 4), torch.zeros(10)),
    "mapping": {"input_ids": Y, "labels": torch.tensor(1)},
}


@pytest.mark.parametrize("sample", SINGLE.values(), ids=SINGLE)
def test_a_single_sample_is_no_batch(sample):
    """Its features aren't samples; a data loader with batch_size=None gives it as it is."""
    for count in (num_samples, lambda batch: split(batch, 2)):
        with pytest.raises(
            TaskError, match=r"can't be counted[\s\S]*DataLoader\(dataset, batch_size"
        ):
            count(sample)


@pytest.mark.parametrize("targets", [torch.zeros(5, 1), torch.zeros(5 * 2), [1, 2], {"boxes": X}])
def test_targets_may_be_several_a_sample(targets):
    """Flattened over a sequence, or in a structure that only the task knows."""
    assert num_samples((X, targets)) == 5
    assert num_samples(({"ids": X, "mask": X}, targets)) == 5


def graph(num_nodes):
    edges = torch.zeros(2, 3 * num_nodes)
    return {"edge_index": edges, "x": torch.zeros(num_nodes, 4), "labels": torch.zeros(num_nodes)}


DISAGREE = {
    "graph": (graph(4), r"'edge_index'\] has 2, batch\['x'\] has 4.*len\(batch\['labels'\]\)"),
    "odd graph": (graph(5), r"len\(batch\['labels'\]\)"),
    "pair of graph": ((graph(4), Y[:4]), r"batch\[0\]\['edge_index'\] has 2.*len\(batch\[1\]\)"),
    "edges first": ((torch.zeros(2, 12), Y[:4]), r"batch\[0\] has 2, batch\[1\] has 4"),
    "nested": ({"a": {"b": X}, "c": [Y, Y[:2]]}, r"batch\['c'\]\[1\] has 2"),
    "sequence first": ((torch.zeros(7, 5, 3), Y), r"batch\[0\] has 7, batch\[1\] has 5"),
    "patches": ({"patches": torch.zeros(9, 2), "ids": X, "mask": X}, r"len\(batch\['ids'\]\)"),
    "too few boxes": ((X, [X[:2], X[:3]]), r"batch\[1\]\[0\] has 2, batch\[1\]\[1\] has 3"),
    "annotations": ({"pixels": X, "labels": [{"boxes": X[:2]}] * 3}, r"batch\['labels'\] has 3"),
}


@pytest.mark.parametrize(("batch", "message"), DISAGREE.values(), ids=DISAGREE)
def test_tensors_that_disagree_are_named_with_the_line_to_write(batch, message):
    """The first one would bend every mean and every duration, or only where the numbers divide."""
    with pytest.raises(TaskError) as caught:
        num_samples(batch)

    assert re.search(message, str(caught.value).replace("\n", " "))
    assert "Task(num_samples=lambda batch: len(" in str(caught.value)


AGREE = {
    "annotations": {"pixels": X, "labels": [{"boxes": torch.zeros(3, 4)}] * 5},
    "annotations of a pair": (X, [{"boxes": torch.zeros(idx, 4)} for idx in range(5)]),
    "boxes of each image": (X, [torch.zeros(idx, 4) for idx in range(5)]),
    "masks of each image, first": {"masks": [torch.zeros(idx, 8) for idx in range(5)], "pixels": X},
    "no boxes at all": (X, [torch.zeros(0, 4)] * 5, [torch.zeros(0)] * 5),
    "views": {"views": [{"image": X}, {"image": X}], "labels": Y},
    "scalars beside": {"x": X, "temperature": torch.tensor(1.0), "name": "a"},
}


@pytest.mark.parametrize("batch", AGREE.values(), ids=AGREE)
def test_what_belongs_to_a_sample_does_not_disagree(batch):
    """Boxes are as many as an image has; what has no dimension belongs to the batch."""
    assert num_samples(batch) == 5


def test_tensors_of_each_sample_are_split_with_their_samples():
    """Boxes, masks and classes lie in lists where images are one tensor."""
    boxes = [torch.full((idx, 4), idx) for idx in range(5)]

    pieces = split({"pixels": X, "boxes": boxes}, 2)

    assert [piece["boxes"] for piece in pieces] == [boxes[:2], boxes[2:4], boxes[4:]]
    assert [len(piece["pixels"]) for piece in pieces] == [2, 2, 1]


STATES = torch.zeros(1, 5, 3)
SAMPLES = [{"x": torch.zeros(8), "y": torch.tensor(idx)} for idx in range(5)]
COUNTED = {
    "states as targets": ((X, (Y, STATES)), "batch[0]"),
    "several states as targets": ((X, (STATES, STATES, Y)), "batch[0]"),
    "states as inputs": (((X, (STATES, STATES)), Y), "batch[1]"),
    "states beside flattened targets": (
        ((torch.zeros(5, 4, 2), (STATES, STATES)), torch.zeros(20)),
        "batch[0][0]",
    ),
    "a triple with states": ((X, (STATES, STATES), Y), "batch[0]"),
    "samples as mappings": (SAMPLES, "batch"),
    "two samples as mappings": ([{"x": X}, {"x": X[:3]}], "batch"),
    "graph and targets in mappings": ((graph(4), {"energy": Y[:3]}), "batch[0]['x']"),
}


@pytest.mark.parametrize(("batch", "path"), COUNTED.values(), ids=COUNTED)
def test_the_line_to_write_counts_the_samples(batch, path):
    """Hidden states have their layers first, and a mapping of a list may be a sample."""
    with pytest.raises(TaskError) as caught:
        num_samples(batch)

    assert f"Task(num_samples=lambda batch: len({path}))" in str(caught.value)


@pytest.mark.parametrize("num", [3, 5, 16])
def test_mappings_in_a_list_are_samples_or_views(num):
    """The first dimension of a sample's image is its channels, that of a view the samples."""
    batch = [{"image": torch.zeros(5, 4, 4), "height": 4} for _ in range(num)]

    if num == 5:
        assert num_samples(batch) == 5
        return
    with pytest.raises(TaskError, match="may be its samples") as caught:
        num_samples(batch)
    assert "len(batch))" in str(caught.value)
    assert "len(batch[0]['image'])" in str(caught.value)


LENGTHS = (3, 1, 4)


def nested(layout):
    parts = [torch.full((length, 2), float(length)) for length in LENGTHS]
    return torch.nested.nested_tensor(parts, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_has_as_many_samples_as_parts(layout):
    """One of strided layout has no shape, and torch's message asks to file an issue."""
    inputs, targets = nested(layout), torch.zeros(3)

    for batch in (inputs, (inputs,), (inputs, targets), {"x": inputs, "labels": targets}):
        assert num_samples(batch) == 3
    assert num_samples((torch.zeros(3, 2), inputs)) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_flat_targets_of_a_nested_tensor_are_weights_not_samples(layout):
    """A loss over 8 tokens of 3 texts is a mean over tokens, and the clock counts texts."""
    with pytest.raises(TaskError, match=r"batch\[0\] has 3, batch\[1\] has 8") as caught:
        num_samples((nested(layout), torch.zeros(sum(LENGTHS))))

    expected = (
        "num_samples=lambda batch: batch[0].size(0), loss_weight=lambda targets: len(targets))"
    )
    assert expected in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_that_would_be_split_is_an_error(layout):
    """No slice of it along its parts is in torch; smaller ones are made where they are collated."""
    with pytest.raises(TaskError, match="collated"):
        split((nested(layout), torch.zeros(3)), 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_model_trains_on_nested_tensors_by_the_advised_line(make_trainer, make_task):
    """A strided one is counted, evaluated and described in errors as any batch."""

    def forward(model, inputs):
        return model(torch.cat(list(inputs.unbind())))

    batch = (nested(torch.strided), torch.zeros(sum(LENGTHS), dtype=torch.long))
    task = make_task(
        model=lambda: torch.nn.Linear(2, 3),
        forward=forward,
        train_dataloader=[batch],
        eval_dataloaders={"test": [batch]},
        num_samples=lambda batch: batch[0].size(0),
        loss_weight=lambda targets: len(targets),
    )

    with make_trainer(task, max_duration="2ep") as trainer:
        trainer.fit()

    assert trainer.state.clock.sample == 6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_is_described(make_trainer, make_task):
    """The note below an error of the model must not hide it behind another."""
    batch = (nested(torch.strided), torch.zeros(3, dtype=torch.long))
    task = make_task(model=lambda: torch.nn.Linear(9, 3), train_dataloader=[batch])

    with make_trainer(task) as trainer, pytest.raises(RuntimeError, match="last_dim") as caught:
        trainer.fit()

    assert describe(batch[0]) == "one tensor of shape (3, ...)"
    assert any("(3, ...)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], Pair(X, Y)], ids=["tuple", "list", "named"])
def test_a_pair_is_inputs_and_targets(batch):
    """Whichever sequence holds them."""
    changed = with_targets(with_inputs(batch, "new inputs"), "new targets")

    assert (inputs_of(batch), targets_of(batch)) == (X, Y)
    assert type(changed) is type(batch)
    assert (changed[0], changed[1]) == ("new inputs", "new targets")


def test_a_mapping_is_its_own_inputs_and_its_labels_are_the_targets():
    """The way of language models: model(**batch)."""
    batch = OrderedDict(input_ids=X, labels=Y)

    assert inputs_of(batch) is batch
    assert targets_of(batch) is Y
    assert with_targets(batch, "new") == {"input_ids": X, "labels": "new"}
    assert targets_of({"input_ids": X}) is None


@pytest.mark.parametrize("batch", [X, Triple(X, "t", Y), (X, Y, Y)], ids=["one", "named", "three"])
def test_anything_else_has_no_targets(batch):
    """Its forward is the task's own."""
    assert not is_pair(batch)
    assert targets_of(batch) is None
    with pytest.raises(TaskError, match="has no targets that could be replaced"):
        with_targets(batch, Y)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((X, Y, "a"), "tuple of 3 (Tensor, Tensor, str)"),
        ({"a": 1, "b": 2}, "dict with 'a', 'b'"),
        (X, "one tensor of shape (5, 2)"),
        (3, "int"),
    ],
)
def test_a_batch_is_described_in_a_few_words(batch, text):
    """Messages say what was there, not what it holds."""
    assert describe(batch) == text


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_data_set_of_samples_needs_batches(microbatch_size, make_trainer, make_task):
    """Unbatched, each feature would count as a sample, and be split from the others."""
    loader = DataLoader(TensorDataset(torch.zeros(6, 3), torch.zeros(6).long()), batch_size=None)
    trainer = make_trainer(make_task(train_dataloader=loader), microbatch_size=microbatch_size)

    with pytest.raises(TaskError, match=r"targets of shape \(\) can't belong"):
        trainer.fit()


def test_a_data_set_of_batches_needs_no_others(make_trainer, make_task, make_batches):
    """Control: batch_size=None is right where items are whole batches."""
    trainer = make_trainer(make_task(train_dataloader=DataLoader(make_batches(), batch_size=None)))

    trainer.fit()

    assert trainer.state.clock.sample == 12
