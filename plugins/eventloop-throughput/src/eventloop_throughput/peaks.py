"""The peak throughput of known devices, from their makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense products of matrices, in TFLOP/s: 1e12 floating-point operations a second.

    Args:
        half: of bfloat16 or float16, added up in float32.
        tf32: of float32 in TF32; as fp32 where the device has none.
        fp32: of float32.
    """

    half: float
    tf32: float
    fp32: float


# By the words of the device's name, from NVIDIA's data sheets, without sparsity.
PEAKS = {
    ("T4",): Peak(65, 8.1, 8.1),
    ("V100",): Peak(125, 15.7, 15.7),
    ("A10",): Peak(125, 62.5, 31.2),
    ("A30",): Peak(165, 82, 10.3),
    ("A40",): Peak(149.7, 74.8, 37.4),
    ("A100",): Peak(312, 156, 19.5),
    ("L4",): Peak(121, 60, 30.3),
    ("L40S",): Peak(362, 183, 91.6),
    ("H100",): Peak(989, 494, 67),
    ("H100", "PCIe"): Peak(756, 378, 51),
    ("H200",): Peak(989, 494, 67),
    ("GH200",): Peak(989, 494, 67),
    ("B200",): Peak(2250, 1100, 75),
    ("RTX", "3090"): Peak(71, 35.6, 35.6),
    ("RTX", "4090"): Peak(165.2, 82.6, 82.6),
}
_KINDS = {"bf16": "half", "fp16": "half", "tf32": "tf32", "fp32": "fp32"}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Returns the peak rate of a device in TFLOP/s; None if unknown.

    Args:
        device_name: from `torch.get_device_module().get_device_name`.
        precision: fp32, tf32, bf16 or fp16.
    """
    words = set(re.split(r"[^0-9A-Za-z]+", device_name))
    keys = [key for key in PEAKS if words.issuperset(key)]
    if not keys:
        return None
    peak: float = getattr(PEAKS[max(keys, key=len)], _KINDS[precision])
    return peak
