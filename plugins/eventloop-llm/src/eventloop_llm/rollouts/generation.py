"""Completions by transformers' `generate`, with a random generator for each sequence; free of hooks."""

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
        max_tokens: maximum number of tokens in a completion.
        temperature: divides the logits.
        top_k: number of most probable tokens to draw from; None for all.
        top_p: smallest probability mass of tokens to draw from.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def seeds_of(
    seed: int, batch: int, num_prompts: int, size: int, rank: int, ranks: int
) -> list[int]:
    """Returns a seed for each completion, the same for any number of ranks.

    Args:
        num_prompts: number of prompts on this rank; its prompt `idx` is prompt
            `idx * ranks + rank` of the batch.
        size: number of completions of a prompt.
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
    """Returns completions of prompts, each drawn from its own random generator.

    A completion depends on its prompt, its seed and the weights only, not on the other prompts of the
    batch or on the rank. Global random generators don't advance.

    Args:
        model: a model of transformers, with `generate`, in evaluation mode.
        prompts_NP, mask_NP: padded on the left.
        seeds: a seed for each prompt.
        options: further arguments of `generate`.

    Returns:
        Tokens, shape (N, T), padded after the end of each completion.
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
            # Greedy search over logits with Gumbel noise draws from their softmax.
            do_sample=False,
            num_beams=1,
            max_new_tokens=sampling.max_tokens,
            logits_processor=processors,
            **options,
        )
    return tokens[:, prompts_NP.shape[1] :]


@contextmanager
def _ends_alone(model: Any) -> Iterator[None]:
    """Reduces a model's generation configuration to its end tokens: penalties would change the draws.

    `generate` reads every option that it isn't given from the configuration (transformers 5.23).
    """
    from transformers import GenerationConfig

    # For a model of peft, `generate` also reads the wrapper's configuration.
    configs = {module: module.generation_config for module in (model, base_of(model))}
    for module, config in configs.items():
        module.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    try:
        yield
    finally:
        for module, config in configs.items():
            module.generation_config = config


def completed(
    model: nn.Module, prompts: Rollouts, seeds: Sequence[int], sampling: Sampling
) -> Rollouts:
    """Adds completions to prompts; they end at the model's end-of-sequence tokens."""
    untyped: Any = model
    config = untyped.generation_config
    ends = end_tokens(config)
    candidates = [token for token in (config.pad_token_id, *ends) if token is not None]
    padding = candidates[0] if candidates else 0
    # Every forward pass of a sharded model gathers weights, so all ranks must make the same number.
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
    """Adds Gumbel noise to logits, with a separate random generator for each sequence.

    Args:
        seeds: a seed for each sequence.
        device: device of the logits.
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
    """Returns 1 for the tokens up to and including the first end token, 0 after it; float.

    Args:
        ends: end-of-sequence tokens.
    """
    is_end_NT = torch.isin(tokens_NT, torch.tensor([*ends], device=tokens_NT.device))
    return (is_end_NT.cumsum(1) - is_end_NT.int() == 0).float()


def logits_of(model: nn.Module, inputs: Mapping[str, Any], num_last: int) -> Tensor:
    """Returns the logits of the last tokens, each predicted from the preceding tokens.

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
        temperature: divides the logits; use the temperature that the tokens were drawn with.
    """
    scaled = logits_NTV.float() / temperature
    chosen = scaled.gather(-1, tokens_NT[..., None])[..., 0]
    return chosen - scaled.logsumexp(-1)


def _seed(*numbers: int) -> int:
    digest = hashlib.sha256("/".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:7], "big")
