"""Races, which a GPU shows once a week, fail each time on the pretend accelerator."""

from __future__ import annotations

import math

import pytest
import torch

from eventloop_testing import RaceError, pretend_device

N = 4


def ones(device):
    return torch.ones(N, device=device)


def pinned(value=1.0):
    return torch.full((N,), value).pin_memory()


# Each as it is written right, and with one line left out.


def copy_to_host(device, *, is_right):
    """An event that isn't waited for before its copy is read."""
    on_host = ones(device).to("cpu", non_blocking=True)
    event = torch.Event(device)
    event.record()
    if is_right:
        event.synchronize()
    return on_host.sum().item()


def event_too_early(device, *, is_right):
    """An event that was recorded before the copy."""
    event, values = torch.Event(device), ones(device)
    if not is_right:
        event.record()
    on_host = torch.empty(N, pin_memory=True).copy_(values, non_blocking=True)
    if is_right:
        event.record()
    event.synchronize()
    return on_host.sum().item()


def event_of_another_stream(device, *, is_right):
    """An event of a stream on which the copy isn't."""
    event, side = torch.Event(device), torch.Stream(device)
    on_host = ones(device).to("cpu", non_blocking=True)
    event.record(torch.accelerator.current_stream() if is_right else side)
    event.synchronize()
    return on_host.sum().item()


def query_ignored(device, *, is_right):
    """A result that is read although the event said that it isn't there."""
    on_host = ones(device).to("cpu", non_blocking=True)
    event = torch.Event(device)
    event.record()
    while not event.query() and is_right:
        pass
    return on_host.sum().item()


def side_stream_not_joined(device, *, is_right):
    """A result of a side stream, which the computing stream doesn't wait for."""
    side = torch.Stream(device)
    with side:
        values = ones(device)
    if is_right:
        torch.accelerator.current_stream().wait_stream(side)
        values.record_stream(torch.accelerator.current_stream())
    return (values + 0).sum().item()


def side_stream_too_early(device, *, is_right):
    """A side stream that reads what the computing stream is still writing."""
    side, values = torch.Stream(device), ones(device)
    if is_right:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = values.sum()
    side.synchronize()
    return total.item()


def written_while_read(device, *, is_right):
    """A tensor that is written in place while a side stream reads it."""
    side, values = torch.Stream(device), ones(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = values.sum()
    if is_right:
        torch.accelerator.current_stream().wait_stream(side)
    values.zero_()
    side.synchronize()
    return total.item()


def buffer_reused(device, *, is_right):
    """A pinned buffer that is filled again while its copy to the device may be under way."""
    buffer = pinned()
    values = buffer.to(device, non_blocking=True)
    if is_right:
        torch.accelerator.current_stream().synchronize()
    buffer.zero_()
    return values.sum().item()


def buffer_reused_after_use(device, *, is_right):
    """The same after the device's work was queued, which isn't done by then."""
    buffer, event = pinned(), torch.Event(device)
    total = buffer.to(device, non_blocking=True).sum()
    event.record()
    if is_right:
        event.synchronize()
    buffer.numpy()[:] = 0
    return total.item()


def memory_not_recorded(device, *, is_right):
    """Memory of a side stream that it takes again while the computing stream uses it."""
    side, computing = torch.Stream(device), torch.accelerator.current_stream()
    with side:
        values = ones(device)
    computing.wait_stream(side)
    if is_right:
        values.record_stream(computing)
    total = values.sum()
    del values
    with side:
        ones(device)
    return total.item()


def memory_taken_again(device, *, is_right):
    """The same, where the side stream waits before it takes memory, instead of a record."""
    side, computing = torch.Stream(device), torch.accelerator.current_stream()
    with side:
        values = ones(device)
    computing.wait_stream(side)
    total = values.sum()
    del values
    if is_right:
        side.wait_stream(computing)
    with side:
        ones(device)
    return total.item()


def two_copies_one_buffer(device, *, is_right):
    """A buffer on the host that the next copy overwrites before it was read."""
    buffer, event = torch.empty(N, pin_memory=True), torch.Event(device)
    buffer.copy_(ones(device), non_blocking=True)
    event.record()
    if is_right:
        event.synchronize()
    first = buffer.sum()
    buffer.copy_(ones(device) * 7, non_blocking=True)
    torch.accelerator.synchronize()
    return first.item()


RACES = (copy_to_host, event_too_early, event_of_another_stream, query_ignored,
         side_stream_not_joined, side_stream_too_early, written_while_read, buffer_reused,
         buffer_reused_after_use, memory_not_recorded, memory_taken_again, two_copies_one_buffer)  # fmt: skip


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_race_fails(race):
    """It raises, or what is read is NaN."""
    result = math.nan

    try:
        with pretend_device() as device:
            result = race(device, is_right=False)
    except RaceError:
        result = math.nan

    assert math.isnan(result)


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_the_same_without_the_race_passes(race, pretend_device):
    """Control: what is in order must be allowed."""
    assert race(pretend_device, is_right=True) == N


FILLS = {torch.float32: 2.5, torch.int64: 7, torch.bool: True, torch.uint8: 7}


@pytest.mark.parametrize("dtype", FILLS, ids=str)
def test_a_copy_that_is_under_way_has_other_values(dtype, pretend_device):
    """Where a type has no NaN, a wrong number must do."""
    values = torch.full((N,), FILLS[dtype], dtype=dtype, device=pretend_device)

    on_host = values.to("cpu", non_blocking=True)

    assert FILLS[dtype] not in on_host.tolist()
    torch.accelerator.synchronize()
    assert on_host.tolist() == [FILLS[dtype]] * N


def test_a_copy_has_the_values_of_its_place_in_the_stream(pretend_device):
    """What is written after it was queued comes too late."""
    values = ones(pretend_device)
    on_host = values.to("cpu", non_blocking=True)
    values.zero_()

    torch.accelerator.synchronize()

    assert on_host.tolist() == [1] * N


def test_a_copy_from_pageable_memory_is_over_at_once(pretend_device):
    """The driver reads it before the call returns; then it may be written."""
    source = torch.ones(N)
    values = source.to(pretend_device, non_blocking=True)

    source.zero_()

    assert values.tolist() == [1] * N


def test_an_event_measures_time(pretend_device):
    """Throughput takes it; both ends must be done."""
    start, end = (torch.Event(pretend_device, enable_timing=True) for _ in range(2))
    start.record()
    end.record()

    with pytest.raises(RuntimeError, match="synchronize"):
        start.elapsed_time(end)
    end.synchronize()

    assert start.elapsed_time(end) >= 0
