"""Each time that the host waits for the pretend accelerator is counted, by plugin and line."""

from __future__ import annotations

import inspect

import pytest
import torch

from eventloop_testing import counted_waits


def event(x):
    mark = torch.Event(x.device)
    mark.record()
    mark.synchronize()


WAITS = {
    "item": lambda x: x.item(),
    "bool": bool,
    "float": float,
    "if": lambda x: 1 if x > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy_": lambda x: torch.empty(1).copy_(x),
    "print": repr,
    "format": lambda x: f"{x[0]:.2f}",
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "to the device": lambda x: torch.ones(1).to(x.device),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "synchronize": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.accelerator.current_stream().synchronize(),
    "event": event,
}
NO_WAITS = {
    "zeros": lambda x: torch.zeros(3, device=x.device),
    "arithmetic": lambda x: (x * 2 + 1).sum().sqrt_(),
    "late copy": lambda x: x.to("cpu", non_blocking=True),
    "copy of pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "query": lambda x: torch.accelerator.current_stream().record_event().query(),
    "shape": lambda x: len(x) + x.numel() + x.shape[0],
    "index": lambda x: x[torch.zeros(1, dtype=torch.long, device=x.device)],
    "fill": lambda x: x.masked_fill_(x > 0, 1.0),
    "fill by mask": lambda x: x.__setitem__(x > 0, 1.0),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_is_counted_once(wait, pretend_device):
    """Whatever it is called."""
    x = torch.ones(1, device=pretend_device)

    with counted_waits() as waits:
        wait(x)
    wait(x)

    assert len(waits) == 1


@pytest.mark.parametrize("work", NO_WAITS.values(), ids=NO_WAITS)
def test_what_does_not_wait_is_not_counted(work, pretend_device):
    """Control: the device is busy, and the host goes on."""
    x = torch.ones(1, device=pretend_device)

    with counted_waits() as waits:
        work(x)

    assert not waits


def test_a_wait_has_its_line(pretend_device):
    """To be found by the author of a plugin."""
    x = torch.ones(1, device=pretend_device)

    with counted_waits() as waits:
        line = inspect.currentframe().f_lineno + 1
        x.item()

    assert waits == [("item", __name__.partition(".")[0], f"{__file__}:{line}")]
