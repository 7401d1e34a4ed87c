"""Letters made by rule, `examples/glyphs.py`: the same ones each time, as hard as asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "glyphs.py"
EASY = {"distortion": 0.2, "clutter": 0, "blur": 0.0, "noise": 0.0}


@pytest.fixture(scope="module")
def glyphs():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("glyphs", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_options_make_the_same_letters(glyphs):
    """A result is about these images; what is trained on changes nothing of those to evaluate on."""

    def made(**options):
        torch.manual_seed(len(options))  # the run's own numbers have no part in it
        task = glyphs.task(num_test=52, **options)
        loaders = task.train_dataloader, task.eval_dataloaders["test"]
        return [loader.dataset.tensors for loader in loaders]

    train, test = made(num_train=104)
    same_train, same_test = made(num_train=104)
    more_train, clean_test = made(num_train=208, label_noise=0.0)
    other_train, other_test = made(num_train=104, data_seed=1)

    assert all(map(torch.equal, (*train, *test), (*same_train, *same_test)))
    assert all(map(torch.equal, test, clean_test))
    assert len(more_train[0]) == 208
    assert not torch.equal(train[0], other_train[0])
    assert not torch.equal(test[0], other_test[0])


def test_a_share_of_the_labels_to_train_on_is_wrong(glyphs):
    """As many as were asked for, but for those that chance gets right; of the others none."""
    task = glyphs.task(num_train=5200, num_test=52, label_noise=0.4)
    train, test = task.train_dataloader.dataset, task.eval_dataloaders["test"].dataset

    wrong_N = train.tensors[1] != torch.arange(5200) % 26

    assert wrong_N.float().mean().item() == pytest.approx(0.4 * 25 / 26, abs=0.02)
    assert torch.equal(test.tensors[1], torch.arange(52) % 26)


def test_each_font_draws_each_letter(glyphs):
    """One that a font lacks would be an empty box, the same for all it lacks, or cut off."""
    letters = glyphs.drawn_letters()

    assert letters.shape == (21, 26, 40, 40)
    for font in letters:
        assert len({one.numpy().tobytes() for one in font}) == 26
    assert (letters.amax((2, 3)) > 0.9).all()
    edges = torch.cat([letters[..., [0, -1], :].flatten(2), letters[..., [0, -1]].flatten(2)], 2)
    assert not edges.any()


@pytest.mark.parametrize("harder", [{"distortion": 0.8}, {"clutter": 3}, {"noise": 0.5}], ids=str)
def test_a_difficulty_makes_letters_harder_to_tell(harder, glyphs):
    """By the nearest mean of images that are as difficult; most of the easy ones are told."""
    easy_told, told = (share_told(glyphs.Writer(0, **one)) for one in (EASY, EASY | harder))

    assert easy_told > 0.6
    assert easy_told - told > 0.05


def test_blur_takes_the_edges(glyphs):
    """Neighbours are more alike; a mean of images is as blurred, so nearness to one tells nothing."""

    def roughness(blur):
        writer = glyphs.Writer(0, **EASY | {"blur": blur})
        return writer.dataset(520, 0.0).tensors[0].diff(dim=-1).abs().mean()

    assert roughness(2.0) < 0.9 * roughness(0.0)


def share_told(writer):
    """Returns how many letters are like the mean image of their kind, rather than another kind's."""
    known, asked = writer.dataset(2600, 0.0).tensors[0], writer.dataset(520, 0.0).tensors[0]
    means = known.reshape(100, 26, -1).mean(0)
    told = torch.cdist(asked.flatten(1), means).argmin(1) == torch.arange(520) % 26
    return told.float().mean().item()
