"""What a GPU does. Whatever is the same on the CPU runs there too; the rest is skipped without one.

Tests take a device from `device`, with a precision from `mode`, with what torch.compile is told
from `compiler`, or `accelerator` alone: a GPU, and the pretend one where there is none. What asks for
kernels, or for code of torch.compile, takes `device_of_kernels`, `mode_of_kernels` or `cuda`. No other file knows what is skipped where.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eventloop import Task, Trainer
from eventloop.config.settings import PrecisionName
from eventloop_testing import pretend_device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRECISIONS = [one for one in get_args(PrecisionName) if one != "auto"]
NUM_CLASSES = 10
Batches = list[tuple[Tensor, Tensor]]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
found = torch.accelerator.current_accelerator(check_available=True)
needs_none = pytest.mark.skipif(
    found is not None and found.type != "pretend", reason="needs no accelerator"
)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs CUDA on two devices")


class Mode(NamedTuple):
    """Where a run computes, and in what."""

    device: torch.device
    precision: str


# Nightly, as the pretend accelerator computes on it.
CPU = pytest.param("cpu", marks=pytest.mark.nightly)
CUDA = pytest.param("cuda:0", marks=needs_cuda)
NO_GPU = pytest.param("pretend:0", marks=needs_none)


@pytest.fixture(params=[CPU, CUDA, NO_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and the GPU or the pretend accelerator."""
    with switched_on(request.param) as device:
        yield device


@pytest.fixture(params=[CUDA, NO_GPU])
def accelerator(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The GPU, or the pretend accelerator."""
    with switched_on(request.param) as device:
        yield device


@pytest.fixture(params=[CPU, CUDA])
def device_of_kernels(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one: what has kernels, and is compiled for."""
    return torch.device(request.param)


@pytest.fixture(params=[CUDA])
def cuda(request: pytest.FixtureRequest) -> torch.device:
    """The GPU."""
    return torch.device(request.param)


@contextmanager
def switched_on(name: str) -> Iterator[torch.device]:
    """Yields the device of a name; the pretend one is switched on meanwhile."""
    with pretend_device() if name.startswith("pretend") else nullcontext():
        yield torch.device(name)


OF_KERNELS = [
    *(pytest.param(("cpu", one), marks=pytest.mark.nightly) for one in PRECISIONS if one != "tf32"),
    *(pytest.param(("cuda:0", one), marks=needs_cuda) for one in PRECISIONS),
]
PRETEND = [("pretend:0", one) for one in PRECISIONS if one != "tf32"]


@pytest.fixture(params=OF_KERNELS, ids="-".join)
def mode_of_kernels(request: pytest.FixtureRequest) -> Mode:
    """Every precision that a device with kernels of its own has."""
    name, precision = request.param
    return Mode(torch.device(name), precision)


@pytest.fixture(
    params=[*OF_KERNELS, *(pytest.param(one, marks=needs_none) for one in PRETEND)], ids="-".join
)
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    """Every precision that a device has, on each, the pretend one where there is no other."""
    name, precision = request.param
    with switched_on(name) as device:
        yield Mode(device, precision)


@pytest.fixture(
    params=[
        # No code is generated for the CPU, which takes long: graphs are captured and differentiated.
        pytest.param(("cpu", {"backend": "aot_eager"}), marks=pytest.mark.nightly),
        pytest.param(("cuda:0", True), marks=needs_cuda),
        pytest.param(("cuda:0", {"mode": "reduce-overhead"}), marks=needs_cuda),
    ],
    ids=str,
)
def compiler(request: pytest.FixtureRequest) -> tuple[torch.device, Any]:
    """A device, and how torch.compile generates code for it: by inductor, and in CUDA graphs."""
    name, compile = request.param
    return torch.device(name), compile


@pytest.fixture(
    params=[
        CPU,
        pytest.param("cuda", marks=needs_two),
        pytest.param("pretend", marks=needs_none),
    ]
)
def two_ranks_on(request: pytest.FixtureRequest) -> Iterator[str]:
    """What two ranks run on: one CPU, two GPUs, or two pretend accelerators."""
    with switched_on(request.param):
        yield request.param


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/, as a script of that folder does."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def timeline(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    """The module benchmarks/gpu_timeline.py."""
    return benchmark_module("gpu_timeline")


@pytest.fixture
def make_images() -> Callable[..., Batches]:
    """Makes batches of 8x8 images, whose class is the brightest channel; the same ones each time."""

    def make_images(num_batches: int = 4, batch_size: int = 16) -> Batches:
        generator = torch.Generator().manual_seed(0)
        shape = (num_batches, batch_size, 3, 8, 8)
        inputs = torch.randn(shape, generator=generator)
        targets = inputs.mean((-1, -2)).argmax(-1)
        return list(zip(inputs, targets, strict=True))

    return make_images


@pytest.fixture
def make_cnn() -> Callable[[], nn.Module]:
    """Makes a small network of convolutions, norms, dropout and products, on the CPU."""

    def make_cnn() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, NUM_CLASSES),
        )  # fmt: skip

    return make_cnn


@pytest.fixture
def make_run(
    make_trainer: Callable[..., Trainer],
    make_images: Callable[..., Batches],
    make_cnn: Callable[[], nn.Module],
) -> Callable[..., Trainer]:
    """Builds trainers of the small network on a device: `make_run(device, task={...}, **settings)`.

    They look neither whether a loss is finite nor at an eval set, as a plain loop doesn't, unless
    told to.
    """

    def make_run(device: torch.device, task: dict[str, Any] | None = None, **given: Any) -> Trainer:
        values = {
            "model": make_cnn,
            "loss": cross_entropy,
            "train_dataloader": make_images(),
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        }
        settings = {"precision": "fp32", "device": str(device), "on_bad_loss": "ignore"} | given
        return make_trainer(Task(**values | (task or {})), **settings)

    return make_run


@pytest.fixture
def math_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets for a plain loop what a run sets for itself: TF32, determinism; no search of cuDNN's."""
    kept = torch.get_float32_matmul_precision()

    def math_of(mode: Mode, *, deterministic: bool = False) -> None:
        has_tf32 = mode.precision != "fp32"
        torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", has_tf32)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        if deterministic:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)

    yield math_of
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(kept)


@pytest.fixture
def mode_of() -> Callable[..., Mode]:
    """Returns the mode of a device in fp32, or in another precision."""

    def mode_of(device: torch.device, precision: str = "fp32") -> Mode:
        return Mode(device, precision)

    return mode_of
