"""Forward passes of language models over rows of documents, and log-probabilities of tokens."""

# B = row of a batch, T = token of a row, V = token of the vocabulary

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eventloop_llm.packing import IGNORED, document_mask


def model_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the arguments with which a model of transformers keeps the documents of each row apart.

    With torch's attention (`sdpa`) they include a mask for each pair of tokens: without a mask,
    transformers synchronizes with the device to check for padding (5.23).

    Args:
        batch: int64, shape (B, T): input_ids, position_ids, and document_ids, -1 for padding.
    """
    parameters = forward_parameters(model)
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
    if "use_cache" in parameters:
        inputs["use_cache"] = False  # with a cache, packed documents would see each other
    if "position_ids" not in parameters:
        return inputs | {"attention_mask": (batch["document_ids"] >= 0).long()}
    inputs["position_ids"] = batch["position_ids"]
    if _takes_masks(base_of(model).config):
        inputs["attention_mask"] = document_mask(batch["document_ids"])
    return inputs


def base_of(model: nn.Module) -> Any:
    """Returns the model without peft's wrapper."""
    untyped: Any = model
    return untyped.get_base_model() if hasattr(model, "get_base_model") else untyped


def forward_parameters(model: nn.Module) -> Collection[str]:
    """Returns the names of the arguments that the model's forward takes."""
    return inspect.signature(base_of(model).forward).parameters


def token_log_probs(logits_BTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each next label, and which labels are trained on.

    Args:
        logits_BTV: logits of a causal language model; computed in float32 or wider.
        labels_BT: labels of the same tokens, not shifted; `IGNORED` where a token isn't trained on.

    Returns:
        Log-probabilities, 0 for ignored labels, and a bool mask; shape (B, T - 1) each.
    """
    next_BT = labels_BT[:, 1:]
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    logits = logits_BTV[:, :-1].to(wide).flatten(0, 1)
    losses = cross_entropy(logits, next_BT.flatten(), reduction="none", ignore_index=IGNORED)
    return -losses.view(next_BT.shape), next_BT != IGNORED


def _takes_masks(config: Any) -> bool:
    """Whether all layers use torch's attention over all tokens, so that a single mask fits all layers."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    is_sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    # Private, but the only record of the choice made by `attn_implementation` (5.23).
    is_sdpa = getattr(text, "_attn_implementation", None) == "sdpa"
    # The load-balancing loss accepts only a mask per token, not per pair of tokens (5.23).
    has_router_loss = getattr(text, "output_router_logits", False)
    return is_sdpa and kinds == {"full_attention"} and not is_sliding and not has_router_loss
