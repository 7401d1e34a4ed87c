"""Numbers on their way to the host."""

from __future__ import annotations

import torch

from eventloop.training.logged_numbers import HostCopy


def test_on_the_host_numbers_have_arrived_at_once():
    """And are what the tensors were."""
    copy = HostCopy([torch.tensor(1.5), torch.tensor(2.0)])

    assert copy.is_ready()
    assert copy.numbers() == [1.5, 2.0]
