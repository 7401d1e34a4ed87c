"""Logged numbers come from the device when it has computed them, and nobody waits for them."""

from __future__ import annotations

import pytest
import torch

from eventloop import hookimpl

NUM_STEPS = 6


class Listens:
    """Keeps the numbers and their moments, and how far the run was when they came."""

    def __init__(self):
        self.rows = []

    @hookimpl
    def log(self, state, numbers, at):
        self.rows.append((at.batch, numbers["train/loss"], state.clock.batch))


class Stalls:
    """Gives the device more to do in one step than the host needs for it and all that follow."""

    def __init__(self, device):
        width = 4096 if device.type == "cuda" else 1
        self.matrix = torch.zeros(width, width, device=device)
        self.product = torch.empty_like(self.matrix)

    @hookimpl
    def before_forward(self, state):
        if state.clock.batch == NUM_STEPS:
            for _ in range(200):
                torch.mm(self.matrix, self.matrix, out=self.product)


class ComputesLosses:
    """Keeps each step's loss on the device."""

    def __init__(self):
        self.losses = []

    @hookimpl
    def after_train_batch(self, state):
        self.losses.append(state.loss)


@pytest.fixture
def logged(make_run):
    """Trains 6 steps, then 6 more; gives what was logged of these, and the losses themselves."""

    def logged(device, *algorithms):
        listens, losses = Listens(), ComputesLosses()
        trainer = make_run(device, algorithms=[losses, *algorithms], callbacks=[listens],
                           max_duration="12ba", log_interval="1ba")  # fmt: skip
        trainer.fit(until=f"{NUM_STEPS}ba")  # memory is taken, kernels are loaded
        listens.rows.clear()
        losses.losses.clear()
        trainer.fit()
        return listens.rows, torch.stack(losses.losses).tolist()

    return logged


def test_every_number_comes_once_and_in_order(device, logged):
    """With the moment that it belongs to, whenever it comes."""
    rows, losses = logged(device)

    assert [at for at, *_ in rows] == list(range(NUM_STEPS + 1, 2 * NUM_STEPS + 1))
    assert [loss for _, loss, _ in rows] == losses


def test_numbers_of_a_busy_device_come_later(device, logged):
    """The host is done with the last step before the first loss is there; it comes, in the end."""
    rows, losses = logged(device, Stalls(device))

    assert [loss for _, loss, _ in rows] == losses
    came_at = [now for *_, now in rows]
    if device.type == "cuda":
        assert came_at == [2 * NUM_STEPS] * NUM_STEPS
    elif device.type == "pretend":  # where no number is there when it is first asked for
        assert came_at[0] == NUM_STEPS + 2
    else:
        assert came_at == list(range(NUM_STEPS + 1, 2 * NUM_STEPS + 1))
