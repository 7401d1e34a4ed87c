"""Which device a process uses, on machines with other accelerators than this one has."""

from __future__ import annotations

import pytest
import torch

from eventloop.devices import choose_device, collective_backends, kind_of, opened_accelerator
from eventloop.errors import SettingError


@pytest.fixture
def accelerator(monkeypatch):
    """Has torch report an accelerator of a type; None for none."""

    def accelerator(kind):
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)

    return accelerator


@pytest.mark.parametrize(
    ("kind", "backends"),
    [
        (None, "gloo"),
        ("cuda", "cpu:gloo,cuda:nccl"),
        ("xpu", "cpu:gloo,xpu:xccl"),
        ("mps", "cpu:gloo,mps:gloo"),
    ],
)
def test_each_accelerator_has_its_backend(kind, backends, accelerator):
    accelerator(kind)

    assert collective_backends() == backends


def test_auto_is_the_cpu_without_an_accelerator(accelerator):
    accelerator(None)

    assert choose_device("auto", local_rank=1) == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_is_the_accelerator_that_torch_has(kind, accelerator):
    """This torch has none of them: the error names which one was tried, with the rank's index."""
    accelerator(kind)

    with pytest.raises(SettingError, match=f"device={kind!r} can't be used") as caught:
        choose_device("auto", local_rank=0)

    assert caught.value.fix == "set device to auto or cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "xpu", "cuda:7", "mps"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(SettingError, match=f"device={name!r} can't be used: "):
        choose_device(name, local_rank=0)


def test_no_accelerator_is_opened_by_the_question(accelerator):
    """A fork after the question must still be able to open it."""
    accelerator("cuda")

    assert opened_accelerator() is None
    assert not torch.cuda.is_initialized()


def test_the_kind_of_a_device_is_made_once():
    assert kind_of(torch.device("cpu")) is kind_of(torch.device("cpu"))
    assert kind_of(torch.device("cpu")).is_host
    assert not kind_of(torch.device("meta")).is_host
