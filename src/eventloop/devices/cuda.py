"""What a GPU of NVIDIA can do, or one of AMD, for which torch has the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from eventloop.devices.device_kind import Accelerator


class Cuda(Accelerator):
    """A GPU of torch's type `cuda`."""

    fuses_optimizers: ClassVar[bool] = True

    def best_precision(self) -> str:
        return "bf16" if _has_bf16() else "fp16"

    def why_not(self, precision: str) -> str:
        is_new = torch.cuda.get_device_capability(self.device) >= (8, 0)
        lacks = (precision == "tf32" and not is_new) or (precision == "bf16" and not _has_bf16())
        return f"{torch.cuda.get_device_name(self.device)} doesn't have it" if lacks else ""

    @contextmanager
    def float32_products(self, *, tf32: bool) -> Iterator[None]:
        saved = _Saved()
        try:
            # The older of torch's two interfaces: who reads by either then finds an answer, while
            # the older one raises where the newer one has set something else (torch 2.13).
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
            yield
        finally:
            saved.put_back()


class _Saved:
    """The process's precision of float32 products, saved to be restored."""

    def __init__(self) -> None:
        backends = torch.backends
        holders: tuple[Any, ...] = (
            backends.cuda.matmul,
            backends.cudnn.conv,  # type: ignore[attr-defined]
            backends.cudnn.rnn,
            backends.mkldnn.matmul,  # type: ignore[attr-defined]
        )
        self._exact = [(one, one.fp32_precision) for one in holders]
        try:
            self._older = (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32)
        except RuntimeError:  # it was set through the newer interface alone
            self._older = ("highest", True)

    def put_back(self) -> None:
        torch.set_float32_matmul_precision(self._older[0])
        torch.backends.cudnn.allow_tf32 = self._older[1]
        for holder, precision in self._exact:
            holder.fp32_precision = precision


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
