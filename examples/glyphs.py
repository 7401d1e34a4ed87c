"""Letters of many fonts, distorted by rule: few images and wrong labels among them, hard to learn from.

eventloop fit examples/glyphs.py
eventloop fit examples/glyphs.py --task.num-train 8000 --task.label-noise 0
eventloop fit examples/glyphs.py --task.distortion 0.4 --task.clutter 0 --max-duration 10ep

The fonts come with matplotlib. Each letter is turned, sheared, bent and blurred, a piece of another one
lies beside it, and some of the labels to train on are wrong. A network can learn so few images by
heart, so that what helps against that shows: docs/explanation/evidence.md. The images are a function of
the options, and made in a second; another `data_seed` makes others. A run takes 15 seconds of one core.
"""

# N = image, H = row, W = column, T = tap of a filter

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn.functional import affine_grid, conv2d, cross_entropy, grid_sample, interpolate
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, schedules

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmmi10"),
)
DRAWN = 40  # pixels of a letter as its font draws it
SIZE = 20  # pixels of an image
# For `eventloop check-loss`: batch norms compute over the samples that they are given.
LOSS_LAWS_NOT_KEPT = {"microbatches": "batch norms", "ranks": "batch norms"}


def drawn_letters() -> Tensor:
    """Returns each letter in each font, white on black, (font, letter, H, W), in [0, 1]."""
    folder = Path(mpl.get_data_path(), "fonts", "ttf")
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), 28) for name in FONTS]
    return torch.stack([torch.stack([drawn(font, one) for one in LETTERS]) for font in fonts])


def drawn(font: ImageFont.FreeTypeFont, letter: str) -> Tensor:
    """Returns a letter with its box in the middle, (H, W)."""
    image = Image.new("L", (DRAWN, DRAWN))
    left, top, right, bottom = font.getbbox(letter)
    corner = ((DRAWN - left - right) / 2, (DRAWN - top - bottom) / 2)
    ImageDraw.Draw(image).text(corner, letter, fill=255, font=font)
    return torch.from_numpy(np.array(image)).float() / 255


class Writer:
    """Makes images of letters; the same seed makes the same ones.

    Args:
        distortion: how far letters are turned, sheared, stretched and bent; 0 for not at all.
        clutter: how many other letters reach into an image.
        blur: standard deviation of the strongest blur, in pixels; 0 for none.
        noise: standard deviation of each pixel's noise, where ink is at most 1.
    """

    def __init__(
        self, seed: int, distortion: float, clutter: int, blur: float, noise: float
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.distortion, self.clutter, self.blur, self.noise = distortion, clutter, blur, noise
        self.drawn = drawn_letters()

    def dataset(self, count: int, label_noise: float) -> TensorDataset:
        """Makes images with labels, all letters as often; a share of the labels is drawn at random."""
        labels_N = torch.arange(count) % len(LETTERS)
        images_NHW = self.images(labels_N)
        wrong_N = self.uniform(count) < label_noise
        random_N = torch.randint(len(LETTERS), (count,), generator=self.generator)
        return TensorDataset(images_NHW[:, None], torch.where(wrong_N, random_N, labels_N))

    def images(self, labels_N: Tensor) -> Tensor:
        """Returns an image for each label, each with mean 0 and standard deviation 1."""
        count = len(labels_N)
        ink_NHW = self.placed(labels_N, size=1.25, away=0.12)
        ink_NHW = ink_NHW * self.uniform(count, 0.5, 1)[:, None, None]
        for _ in range(self.clutter):
            others_N = torch.randint(len(LETTERS), (count,), generator=self.generator)
            other_NHW = self.placed(others_N, size=0.8, away=1.0)
            other_NHW = other_NHW * self.uniform(count, 0.3, 0.8)[:, None, None]
            ink_NHW = torch.maximum(ink_NHW, other_NHW)
        ink_NHW = self.blurred(ink_NHW)
        ink_NHW = ink_NHW + self.noise * torch.randn(ink_NHW.shape, generator=self.generator)
        deviation, mean = torch.std_mean(ink_NHW, (1, 2), keepdim=True)
        return (ink_NHW - mean) / deviation.clamp_min(1e-6)

    def placed(self, labels_N: Tensor, size: float, away: float) -> Tensor:
        """Draws each letter in a random font, up to `away` half images from the middle, distorted."""
        fonts_N = torch.randint(len(FONTS), labels_N.shape, generator=self.generator)
        letters_NHW = self.drawn[fonts_N, labels_N]
        bent_N2HW = interpolate(
            0.1 * self.distortion * torch.randn(len(labels_N), 2, 5, 5, generator=self.generator),
            (SIZE, SIZE),
            mode="bicubic",
            align_corners=True,
        )
        grid_NHW2 = affine_grid(
            self.affine(len(labels_N), size, away),
            [len(labels_N), 1, SIZE, SIZE],
            align_corners=False,
        )
        return grid_sample(
            letters_NHW[:, None], grid_NHW2 + bent_N2HW.permute(0, 2, 3, 1), align_corners=False
        )[:, 0]

    def affine(self, count: int, size: float, away: float) -> Tensor:
        """Draws maps from a place in an image to one in the drawn letter, (N, 2, 3)."""
        angle_N = self.uniform(count, -1, 1) * self.distortion * math.pi / 8
        cos_N, sin_N, one_N = angle_N.cos(), angle_N.sin(), torch.ones(count)
        turn_N22 = torch.stack([cos_N, -sin_N, sin_N, cos_N], -1).unflatten(-1, (2, 2))
        shear_N = self.uniform(count, -1, 1) * self.distortion * 0.3
        shear_N22 = torch.stack([one_N, shear_N, 0 * one_N, one_N], -1).unflatten(-1, (2, 2))
        sizes_N2 = size * torch.exp(self.uniform((count, 2), -1, 1) * self.distortion / 4)
        map_N22 = turn_N22 @ shear_N22 / sizes_N2[:, :, None]
        place_N2 = self.uniform((count, 2), -1, 1) * away
        return torch.cat([map_N22, -map_N22 @ place_N2[:, :, None]], -1)

    def blurred(self, images_NHW: Tensor) -> Tensor:
        """Blurs each image by an amount of its own."""
        if not self.blur:
            return images_NHW
        sigma_N = self.uniform(len(images_NHW), 0.1, max(self.blur, 0.1))
        weights_NT = torch.exp(-0.5 * (torch.arange(-3, 4) / sigma_N[:, None]) ** 2)
        weights_NT = weights_NT / weights_NT.sum(1, keepdim=True)
        filters_NTT = weights_NT[:, :, None] * weights_NT[:, None, :]
        return conv2d(images_NHW[None], filters_NTT[:, None], padding=3, groups=len(sigma_N))[0]

    def uniform(self, shape: int | tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draws numbers between two."""
        return low + (high - low) * torch.rand(shape, generator=self.generator)


def make_model(width: int) -> nn.Module:
    """A small convolutional network; images of shape (N, 1, H, W) in, a logit a letter out."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, len(LETTERS)),
    )  # fmt: skip


def teacher() -> nn.Module:
    """A network four times as wide, for `--distill.teacher ./examples/glyphs.py:teacher`."""
    return make_model(width=64)


def task(
    lr: float = 0.1,
    final_frac: float = 0.0,
    batch_size: int = 64,
    width: int = 16,
    num_train: int = 2000,
    num_test: int = 4000,
    distortion: float = 0.8,
    clutter: int = 1,
    blur: float = 0.8,
    noise: float = 0.05,
    label_noise: float = 0.1,
    data_seed: int = 0,
) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate at the start; it falls over the run, along a cosine.
        final_frac: share of it that is left at the end; 1 keeps it as it is.
        batch_size: images a step.
        width: channels of the first convolution.
        num_train: images to train on.
        num_test: images to evaluate on; their labels are right.
        distortion: how far letters are turned, sheared, stretched and bent; 0 for not at all.
        clutter: how many other letters reach into an image.
        blur: standard deviation of the strongest blur, in pixels; 0 for none.
        noise: standard deviation of each pixel's noise, where ink is at most 1.
        label_noise: share of the labels to train on that is drawn at random.
        data_seed: which images are made.
    """
    writer = Writer(data_seed, distortion, clutter, blur, noise)
    test = writer.dataset(num_test, label_noise=0.0)
    train = writer.dataset(num_train, label_noise)
    return Task(
        model=lambda: make_model(width).to(memory_format=torch.channels_last),  # a third less time
        loss=cross_entropy,
        train_dataloader=DataLoader(train, batch_size, shuffle=True),
        eval_dataloaders={"test": DataLoader(test, 500)},
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr, momentum=0.9, weight_decay=5e-4
        ),
        scheduler=schedules.cosine(final_frac=final_frac),
        metrics={"accuracy": MulticlassAccuracy(len(LETTERS), average="micro")},
        settings={"max_duration": "25ep", "eval_interval": "5ep"},
    )
