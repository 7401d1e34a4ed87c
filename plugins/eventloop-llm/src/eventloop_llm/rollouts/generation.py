"""Completions by transformers' `generate`, whose draws depend on each sequence alone; free of hooks."""

# N = completion, P = position of a prompt, T = position of a completion, V = token of the vocabulary

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eventloop.toolbox import sharded
from eventloop_llm.models.passes import base_of, forward_parameters
from eventloop_llm.rollouts.completions import Rollouts


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Args:
        max_tokens: of a completion, at most.
        temperature: logits are divided by it.
        top_k: so many tokens can be drawn; None for all.
        top_p: tokens that hold this share of the probability can be drawn.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def seeds_of(
    seed: int, batch: int, num_prompts: int, size: int, rank: int, ranks: int
) -> list[int]:
    """Returns a seed for each completion, by the run, the batch, the prompt's place and its number.

    Args:
        num_prompts: of this rank; its prompt `idx` is number `idx * ranks + rank` of the batch.
        size: completions of a prompt.
    """
    return [
        _seed(seed, batch, idx * ranks + rank, number)
        for idx in range(num_prompts)
        for number in range(size)
    ]


def generated(
    model: nn.Module,
    prompts_NP: Tensor,
    mask_NP: Tensor,
    seeds: Sequence[int],
    sampling: Sampling,
    **options: Any,
) -> Tensor:
    """Returns completions of prompts, each drawn from a generator of its own.

    So a completion depends on its prompt, its seed and the weights, not on what else is generated at
    the same time, nor on which rank. Draws from no other generator.

    Args:
        model: of transformers, with `generate`, in evaluation mode.
        prompts_NP, mask_NP: padded on the left.
        seeds: one for each prompt.
        options: further arguments of `generate`.

    Returns:
        Tokens, shape (N, T); what follows the end of a completion is padding.
    """
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(_Draws(seeds, prompts_NP.device))
    untyped: Any = model
    with _ends_alone(untyped):
        tokens: Tensor = untyped.generate(
            input_ids=prompts_NP,
            attention_mask=mask_NP,
            # The highest of logits with Gumbel noise is a draw from their softmax.
            do_sample=False,
            num_beams=1,
            max_new_tokens=sampling.max_tokens,
            logits_processor=processors,
            **options,
        )
    return tokens[:, prompts_NP.shape[1] :]


@contextmanager
def _ends_alone(model: Any) -> Iterator[None]:
    """Leaves a model's own generation configuration its end tokens: penalties would change the draws.

    `generate` takes from it whatever it isn't given (transformers 5.23).
    """
    from transformers import GenerationConfig

    # Of a model of peft's, `generate` reads the wrapper's configuration, too.
    configs = {part: part.generation_config for part in (model, base_of(model))}
    for part, config in configs.items():
        part.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    try:
        yield
    finally:
        for part, config in configs.items():
            part.generation_config = config


def completed(
    model: nn.Module, prompts: Rollouts, seeds: Sequence[int], sampling: Sampling
) -> Rollouts:
    """Returns prompts with completions, which end at the model's end-of-sequence tokens."""
    untyped: Any = model
    config = untyped.generation_config
    ends = end_tokens(config)
    candidates = [token for token in (config.pad_token_id, *ends) if token is not None]
    padding = candidates[0] if candidates else 0
    # Slices of a sharded model are gathered in each pass, which all ranks make.
    is_sharded = any(sharded(param) is not None for param in model.parameters())
    tokens = generated(
        model, prompts.prompt_ids, prompts.prompt_mask, seeds, sampling,
        pad_token_id=padding, synced_gpus=is_sharded,
    )  # fmt: skip
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    return replace(
        prompts,
        completion_ids=tokens,
        completion_mask=completion_mask(tokens, ends),
        is_ended=is_end.any(1),
    )


def end_tokens(config: Any) -> list[int]:
    """Returns the tokens that end a completion, by a generation configuration."""
    ends = config.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


class _Draws:
    """Adds Gumbel noise to logits: that of each sequence from a generator of its own.

    Args:
        seeds: one for each sequence.
        device: of the logits.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores_NV: Tensor) -> Tensor:
        uniform_NV = torch.stack(
            [
                torch.rand(scores_NV.shape[1], generator=generator, device=scores_NV.device)
                for generator in self._generators
            ]
        )
        tiny = torch.finfo(torch.float32).tiny
        return scores_NV.float() - (-uniform_NV.clamp(min=tiny).log()).clamp(min=tiny).log()


def completion_mask(tokens_NT: Tensor, ends: Sequence[int]) -> Tensor:
    """Returns 1 for the tokens up to the first end, with it, and 0 after it; float.

    Args:
        ends: the tokens that end a completion.
    """
    is_end_NT = torch.isin(tokens_NT, torch.tensor([*ends], device=tokens_NT.device))
    return (is_end_NT.cumsum(1) - is_end_NT.int() == 0).float()


def logits_of(model: nn.Module, inputs: Mapping[str, Any], num_last: int) -> Tensor:
    """Returns the logits of the last tokens, each from the tokens before it.

    Args:
        inputs: arguments of the model: prompts, padded on the left, with completions.
        num_last: how many tokens at the end are predicted.

    Returns:
        Shape (N, num_last, V).
    """
    options: dict[str, Any] = {}
    if "logits_to_keep" in forward_parameters(model):
        options["logits_to_keep"] = num_last + 1
    logits: Tensor = model(**inputs, **options).logits
    return logits[:, -num_last - 1 : -1]


def token_logps(logits_NTV: Tensor, tokens_NT: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-probability of each token, float32, shape (N, T).

    Args:
        temperature: logits are divided by it, as when the tokens were drawn.
    """
    scaled = logits_NTV.float() / temperature
    chosen = scaled.gather(-1, tokens_NT[..., None])[..., 0]
    return chosen - scaled.logsumexp(-1)


def _seed(*parts: int) -> int:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")
