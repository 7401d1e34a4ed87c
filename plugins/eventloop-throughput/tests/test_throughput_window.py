"""The window and the table of peaks."""

import pytest

from eventloop_throughput import Amounts, Window, peak_tflops


def batch(seconds, samples=4):
    return Amounts(seconds, seconds / 4, 1, samples, 10 * samples, 2.0 * samples)


def test_a_window_adds_up_the_latest_batches():
    """What has dropped out must leave no trace."""
    window = Window(3)

    for seconds in (100.0, 50.0, 1.0, 2.0, 4.0):
        window.add(batch(seconds))

    assert window.total() == Amounts(7.0, 1.75, 3, 12, 120, 24.0)


def test_the_first_batch_counts_for_nothing():
    """It waits for workers and compilation, and would be in the numbers of the next hundred."""
    window = Window(100)
    window.add(batch(60.0))
    after_one = window.total()

    window.add(batch(0.5))

    assert after_one is None
    assert window.total() == batch(0.5)


@pytest.mark.parametrize("num_batches", [0, -3])
def test_a_window_without_batches_is_refused(num_batches):
    """It would log nothing, in silence."""
    with pytest.raises(ValueError, match=f"window of {num_batches} batches"):
        Window(num_batches)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A10", "fp16", 125),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("NVIDIA L40S", "fp16", 362),
        ("NVIDIA GeForce RTX 2060", "fp16", None),
        ("NVIDIA A1000 Laptop GPU", "fp16", None),
    ],
)
def test_a_device_is_known_by_whole_words(device, precision, peak):
    """An A1000 is not an A100, and a wrong peak makes a wrong MFU."""
    assert peak_tflops(device, precision) == peak
