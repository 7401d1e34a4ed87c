"""What CUDA has of precisions: bf16 in hardware or none, TF32 where float32 isn't asked for."""

from __future__ import annotations

import pytest
import torch

from eventloop.errors import SettingError
from eventloop.training.grad_scaling import Unscaled
from eventloop.training.precision import choose_precision

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """What torch says of a GPU: with bf16 in hardware or without, and of which capability."""

    def gpu(*, bf16: bool = True, capability: tuple[int, int] = (8, 0)) -> None:
        answers = {
            "is_bf16_supported": lambda including_emulation: bf16,
            "get_device_capability": lambda device: capability,
            "get_device_name": lambda device: "Tesla T4",
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    return gpu


@pytest.mark.parametrize(("bf16", "best"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_what_a_gpu_has_in_hardware(bf16, best, gpu, monkeypatch):
    """bf16 needs no scaling, where it isn't emulated."""
    gpu(bf16=bf16)
    monkeypatch.setattr(
        "eventloop.training.precision.Scaled", lambda device: Unscaled()
    )  # needs a GPU

    assert choose_precision("auto", GPU).name == best


@pytest.mark.parametrize("name", ["tf32", "bf16"])
def test_what_an_older_gpu_lacks_is_refused(name, gpu):
    """It would be emulated, and slower than float32."""
    gpu(bf16=False, capability=(7, 5))

    with pytest.raises(SettingError, match=f"precision={name!r}, but Tesla T4 doesn't have it"):
        choose_precision(name, GPU)


def products() -> tuple[str, bool]:
    """In what the process computes products of float32 on a GPU."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp32", ("highest", False)), ("tf32", ("high", True)), ("bf16", ("high", True))],
)
def test_tf32_is_allowed_where_float32_isnt_asked_for(name, expected, gpu):
    """Torch allows it for convolutions alone; fp32 must be float32 throughout."""
    gpu()
    before = products()

    with choose_precision(name, GPU).in_force():
        inside = products()

    assert inside == expected
    assert products() == before


def test_what_the_process_had_set_is_put_back_after_an_error(gpu):
    """Whoever catches it goes on computing as before."""
    gpu()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyError), choose_precision("fp32", GPU).in_force():
            raise KeyError

        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
