"""Two networks against each other: a GAN that draws handwritten digits of the class it is asked for.

eventloop fit examples/gan.py
eventloop fit examples/gan.py --nproc 2 --precision bf16 --task.width 16

Each batch makes two updates, one for each network: `Adversarial` owns `train_batch`. The folder of the
run gets a picture every few epochs and at the end, with real digits below the drawn ones.
"""

# B = batch, N = noise, K = classes, R = rows of a picture, H = height, W = width

import struct
import zlib
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.utils.data import DataLoader, TensorDataset

from eventloop import State, StateView, StepOutcome, Task, hookimpl, schedules

NUM_CLASSES, NUM_NOISE = 10, 32
# For `eventloop check-loss`: the generator draws from noise.
LOSS_LAWS_NOT_KEPT = {"draws": "noise is drawn for each update"}


class Generator(nn.Module):
    """Draws images of shape (B, 1, 8, 8) in [-1, 1], from noise of shape (B, N) and labels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(NUM_CLASSES, NUM_CLASSES)
        self.layers = nn.Sequential(
            nn.Linear(NUM_NOISE + NUM_CLASSES, 2 * width * 4 * 4), nn.LeakyReLU(0.2),
            nn.Unflatten(1, (2 * width, 4, 4)),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 1, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise_BN: Tensor, labels_B: Tensor) -> Tensor:
        return self.layers(torch.cat([noise_BN, self.classes(labels_B)], dim=1))


class Discriminator(nn.Module):
    """Tells how real images look for digits of their class; one logit each, shape (B,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(4 * width * 2 * 2, NUM_CLASSES),
        )  # fmt: skip

    def forward(self, images_B1HW: Tensor, labels_B: Tensor) -> Tensor:
        logits_BK = self.layers(images_B1HW)
        return logits_BK.gather(1, labels_B[:, None]).squeeze(1)


class Networks(nn.Module):
    """The one model of the task; only its parts are called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = Generator(width)
        self.discriminator = Discriminator(width)


def make_optimizer(network: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adam without momentum, which would carry a network past the other one's answer."""
    return torch.optim.Adam(network.parameters(), lr, betas=(0.0, 0.99), fused=True)


class Adversarial:
    """Trains the discriminator, then the generator, on each batch.

    Args:
        penalty: what a slope of the discriminator's logits at real images costs.

    Source: Goodfellow et al. 2014, arXiv:1406.2661, section 3, with the loss that doesn't saturate;
    the penalty is R1 of Mescheder et al. 2018, arXiv:1801.04406.
    """

    name = "adversarial"

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    @hookimpl
    def train_batch(self, state: State) -> bool | StepOutcome:
        """Makes two updates; what the last of them gives says whether the schedulers move."""
        state.update(self.discriminator_loss, ["D"])
        return state.update(self.generator_loss, ["G"])

    def discriminator_loss(self, state: State) -> Tensor:
        """Returns what it costs not to tell real from drawn."""
        labels_B = state.targets
        real_B1HW = state.inputs.detach().requires_grad_()
        real_B = state.model.discriminator(real_B1HW, labels_B)
        (slope_B1HW,) = torch.autograd.grad(real_B.sum(), real_B1HW, create_graph=True)
        drawn_B = state.model.discriminator(drawn(state).detach(), labels_B)
        steepness = slope_B1HW.square().sum(dim=(1, 2, 3)).mean()
        return softplus(-real_B).mean() + softplus(drawn_B).mean() + self.penalty * steepness

    def generator_loss(self, state: State) -> Tensor:
        """Returns what it costs to be found out."""
        return softplus(-state.model.discriminator(drawn(state), state.targets)).mean()


def drawn(state: State) -> Tensor:
    """Draws a digit for each label of the microbatch; on each rank from noise of its own."""
    generator = state.generator("adversarial")
    noise_BN = torch.randn(len(state.targets), NUM_NOISE, generator=generator, device=state.device)
    return state.model.generator(noise_BN, state.targets)


class Pictures:
    """Draws digits from the same noise every few epochs and at the end, above real ones.

    Args:
        real_RK1HW: the real ones.
        num_rows: how many of each class to draw.
    """

    name = "pictures"

    def __init__(self, real_RK1HW: Tensor, num_rows: int = 8) -> None:
        noise = torch.Generator().manual_seed(0)
        self.real_RK1HW = real_RK1HW
        self.noise_BN = torch.randn(num_rows * NUM_CLASSES, NUM_NOISE, generator=noise)
        self.labels_B = torch.arange(NUM_CLASSES).repeat(num_rows)

    @hookimpl(every="5ep", rank_zero=True)
    def epoch_end(self, state: StateView) -> None:
        self.draw(state)

    @hookimpl(rank_zero=True)
    def fit_end(self, state: StateView) -> None:
        self.draw(state)

    @torch.no_grad()
    def draw(self, state: StateView) -> None:
        """Writes `digits-BATCH.png` into the folder of the run."""
        noise_BN, labels_B = self.noise_BN.to(state.device), self.labels_B.to(state.device)
        drawn_B1HW = state.model.generator(noise_BN, labels_B).cpu()
        drawn_RK1HW = drawn_B1HW.unflatten(0, (-1, NUM_CLASSES))
        state.run_dir.mkdir(parents=True, exist_ok=True)
        picture_HW = tiled(torch.cat([drawn_RK1HW, self.real_RK1HW]))
        write_png(state.run_dir / f"digits-{state.clock.batch:05d}.png", picture_HW)


def tiled(images_RK1HW: Tensor, zoom: int = 6) -> Tensor:
    """Lays images in [-1, 1] out in a grid, with a line around each; gives bytes, larger."""
    framed_RKHW = pad(images_RK1HW.squeeze(2), (1, 1, 1, 1), value=-0.5)
    grid_HW = framed_RKHW.transpose(1, 2).flatten(2).flatten(0, 1)
    grey_HW = ((grid_HW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return grey_HW.repeat_interleave(zoom, dim=0).repeat_interleave(zoom, dim=1)


def write_png(path: Path, grey_HW: Tensor) -> None:
    """Writes shades of grey, uint8, as a PNG.

    Source: W3C, Portable Network Graphics, section 11.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    height, width = grey_HW.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    unfiltered = pad(grey_HW, (1, 0)).numpy().tobytes()  # each row after a 0
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(unfiltered))
        + chunk(b"IEND", b"")
    )


def task(lr: float = 1e-3, batch_size: int = 64, width: int = 32, penalty: float = 0.05) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate of both networks at the start; it falls to zero in a straight line.
        batch_size: images a step.
        width: channels of the networks where they have fewest.
        penalty: what a slope of the discriminator's logits at real images costs.
    """
    images, labels = load_digits(return_X_y=True)
    images_B1HW = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels_B = torch.tensor(labels)
    dataset = TensorDataset(images_B1HW, labels_B)
    first_of_each = [images_B1HW[labels_B == label][:3] for label in range(NUM_CLASSES)]
    return Task(
        model=lambda: Networks(width),
        train_dataloader=DataLoader(dataset, batch_size, shuffle=True),
        optimizer=lambda model: {
            "D": make_optimizer(model.discriminator, lr),
            "G": make_optimizer(model.generator, lr),
        },
        scheduler=schedules.linear(),
        algorithms=[Adversarial(penalty)],
        callbacks=[Pictures(torch.stack(first_of_each, dim=1))],
        settings={"max_duration": "30ep"},
    )
