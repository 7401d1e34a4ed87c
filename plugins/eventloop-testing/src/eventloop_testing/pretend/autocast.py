"""Autocast on the pretend device, by the rules that torch recommends to out-of-tree devices.

They are the macros of ATen/autocast_mode.h (torch 2.13), which CUDA uses, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eventloop_testing.pretend import private


def _names(text: str) -> list[str]:
    return text.split()


DTYPES = [torch.bfloat16, torch.float16]

# Computed in the type of autocast.
LOWER = _names("""_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention""") + [
    f"{name}.{kind}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data")
]  # fmt: skip
# Computed in float32.
FLOAT32 = _names("""acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d norm.Scalar norm.ScalarOpt_dim
    """)
# Computed in float32 unless called with a dtype.
FLOAT32_UNLESS_GIVEN = _names("""prod prod.dim_int softmax.int log_softmax.int cumprod cumsum
    linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""")
# Computed in the widest dtype among the arguments.
WIDEST = _names("""addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
    scatter_add cat stack""")


def implement() -> None:
    """Registers the rules; operators without a rule skip autocast."""
    private.implement_the_rest(torch.library.fallthrough_kernel, private.AUTOCAST_KEY)
    for names, kernel in (
        (LOWER, _lower),
        (FLOAT32, _float32),
        (FLOAT32_UNLESS_GIVEN, _float32_unless_given),
        (WIDEST, _widest),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            private.implement(name, kernel(operator), private.AUTOCAST_KEY)
    private.implement("binary_cross_entropy", _refused, private.AUTOCAST_KEY)


def _lower(operator: Any) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(private.NAME)
        with private.without_autocast():
            return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return compute


def _float32(operator: Any) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with private.without_autocast():
            return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return compute


def _float32_unless_given(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in private.schema_of(operator).arguments]

    def compute(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if args[0].dtype in DTYPES and arguments.get("dtype") is None:
            arguments["dtype"] = torch.float32
        with private.without_autocast():
            return operator(**arguments)

    return compute


def _widest(operator: Any) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        dtypes = {tensor.dtype for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()}
        with private.without_autocast():
            if len(dtypes) > 1 and torch.float64 not in dtypes:
                args = _cast(args, torch.float32)
                kwargs = _cast(kwargs, torch.float32)
            return operator(*args, **kwargs)

    return compute


def _refused(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
        "use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for nested in value for tensor in _tensors(nested)]
    return []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        is_eligible = value.device.type == private.NAME and value.is_floating_point()
        return value.to(dtype) if is_eligible and value.dtype is not torch.float64 else value
    if isinstance(value, dict):
        return {name: _cast(nested, dtype) for name, nested in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(nested, dtype) for nested in value])
    return value
