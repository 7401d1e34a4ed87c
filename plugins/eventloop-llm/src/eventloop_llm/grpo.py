"""Learning from rewards for generated completions: the plugin `grpo`, and a task for it.

eventloop fit eventloop_llm.grpo --task.model FOLDER --task.data prompts.jsonl --grpo.num-generations 8
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from eventloop import PluginError, State, StepOutcome, Task, TaskError, Time, hookimpl
from eventloop.toolbox import as_option, evaluation_mode
from eventloop_llm.chats.rows import read_rows
from eventloop_llm.chats.tokens import Conversations, made_of_rows
from eventloop_llm.models.model_task import ModelTask, Schedule, training
from eventloop_llm.models.passes import model_inputs
from eventloop_llm.models.pretrained import Dtype, model_maker, named_tokenizer, tokenizer_of
from eventloop_llm.rollouts.completions import Rollouts, minibatch, prompts_of, texts_of
from eventloop_llm.rollouts.generation import Sampling, completed, logits_of, seeds_of, token_logps
from eventloop_llm.rollouts.policy_losses import LOSSES, SCALES, policy_loss, weight_of
from eventloop_llm.rollouts.rewards import named_reward, rows_of, scaled, summed, table_of
from eventloop_llm.rollouts.rollout_hooks import RolloutHooks


class Grpo:
    """Trains a language model on rewards for its own completions: GRPO, DAPO, Dr. GRPO.

    A batch of the task is a batch of prompts. The model generates completions of each prompt, the
    completions are rewarded, and the loss raises the probability of completions that are better than
    their prompt's average. The task's own loss isn't computed.

    Args:
        num_generations: completions of a prompt, 2 or more.
        reward: module:function or ./file.py:function; in Python the function itself: takes `Rollouts`,
            returns a number for each. Other packages add rewards with the hook `reward`.
        tokenizer: folder of the tokenizer that decodes completions; in Python the tokenizer.
        max_tokens: maximum number of tokens in a completion.
        temperature: divides the logits, both for drawing completions and in the loss.
        top_k: number of most probable tokens to draw from; none for all.
        top_p: smallest probability mass of tokens to draw from, in (0, 1].
        loss: "dapo", "grpo" or "dr_grpo": how the loss is averaged.
        scale_rewards: divisor of the rewards' differences: the standard deviation within the "group" or
            the "batch", or "none".
        epsilon: ratios are clipped to [1 - epsilon, 1 + epsilon_high].
        epsilon_high: upper clipping range; `epsilon` if not set.
        beta: weight of the divergence from the reference, the model before training; 0 needs no
            reference.
        unbiased_kl: whether the divergence is multiplied by the ratio, which makes its gradient unbiased.
        num_iterations: number of passes over the completions of a batch.
        steps_per_generation: number of updates in each pass.
        mask_truncated: whether the loss ignores completions that reached `max_tokens`.
        log_rollouts: how often completions are logged as a table; None for never.

    Raises:
        ValueError: an option is out of its range.

    Source: Shao et al. 2024, arXiv:2402.03300; Yu et al. 2025, arXiv:2503.14476; Liu et al. 2025,
    arXiv:2503.20783.
    """

    role = "algorithm"
    hookspecs = RolloutHooks

    def __init__(
        self,
        *,
        num_generations: int,
        reward: str | Callable[[Rollouts], Any] | None = None,
        tokenizer: str | Any = None,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        loss: str = "dapo",
        scale_rewards: str = "group",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        unbiased_kl: bool = True,
        num_iterations: int = 1,
        steps_per_generation: int = 1,
        mask_truncated: bool = False,
        log_rollouts: Time | None = Time("10ba"),  # noqa: B008  it is frozen
    ) -> None:
        self.num_generations = num_generations
        self.reward_function = reward
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.loss_kind: Any = loss
        self.scale_rewards: Any = scale_rewards
        self.epsilon = epsilon
        self.epsilon_high = epsilon_high
        self.beta = beta
        self.unbiased_kl = unbiased_kl
        self.num_iterations = num_iterations
        self.steps_per_generation = steps_per_generation
        self.mask_truncated = mask_truncated
        self.log_rollouts = None if log_rollouts is None else Time(log_rollouts)
        _check_options(self)
        self._judge = named_reward(reward)
        self._tokenizer = named_tokenizer(tokenizer)
        self._reference: nn.Module | None = None
        self._rollouts_to_log: tuple[Rollouts, Tensor, Tensor] | None = None
        self._interval: Time | None = None

    @hookimpl(trylast=True, after=("lora",))
    def init(self, state: State) -> None:
        """Creates the reference: a copy of the model, unless it has adapters that can be disabled."""
        if not self.beta or hasattr(state.model, "disable_adapter"):
            return
        if any(param.is_meta for param in state.model.parameters()):
            raise PluginError(
                "grpo: the model has no weights yet, and its reference would have none",
                fix="leave out " + as_option("fsdp", meta=True) + ", or give beta=0",
            )
        self._reference = state.companion("grpo", lambda: copy.deepcopy(state.model))

    @hookimpl
    def after_load(self, state: State) -> None:
        """Resolves the interval at which completions are logged."""
        if self.log_rollouts is not None:
            self._interval = state.resolve(self.log_rollouts)

    @hookimpl
    def train_batch(self, state: State) -> bool | StepOutcome:
        """Generates completions, rewards them, and takes the steps."""
        rows = self._with_logps(state, self._judged(state, self._generated(state)))
        num = len(rows["advantages"])
        if num < self.steps_per_generation:
            raise PluginError(
                f"grpo: {num} completions can't be split into {self.steps_per_generation} updates",
                fix=as_option("grpo", steps_per_generation=1) + ", or larger batches",
            )
        stepped: bool | StepOutcome = False
        minibatches = torch.arange(num, device=state.device).tensor_split(self.steps_per_generation)
        for _ in range(self.num_iterations):
            for numbers in minibatches:
                state.batch = minibatch(rows, numbers)
                stepped = state.update(self._loss)
        return stepped

    @hookimpl(conditional=True, trylast=True)
    def rollout(self, state: State, prompts: Rollouts, seeds: Sequence[int]) -> Rollouts:
        """Generates completions with transformers."""
        if getattr(state.model, "generation_config", None) is None:
            raise PluginError(
                f"grpo: {type(state.model).__name__} can't generate",
                fix="train a model of transformers, or install a plugin that owns `rollout`",
            )
        sampling = Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p)
        return completed(state.model, prompts, seeds, sampling)

    @hookimpl
    def reward(self, state: State, rollouts: Rollouts) -> Any:
        """Returns the rewards of the `reward` function; None if there is no such function."""
        return None if self._judge is None else self._judge(rollouts)

    @hookimpl(conditional=True, tryfirst=True)
    def weigh_microbatch(self, state: State) -> Tensor | int | None:
        """Returns the number of tokens or completions over which the loss is averaged."""
        batch = state.batch if state.microbatch is None else state.microbatch
        if not isinstance(batch, dict) or "completion_mask" not in batch:
            return None
        return weight_of(batch["completion_mask"], self.loss_kind)

    @hookimpl
    def batch_end(self, state: State) -> None:
        """Logs completions as a table, at the interval `log_rollouts`."""
        is_due = self._interval is not None and state.clock.crossed(self._interval)
        if is_due and self._rollouts_to_log is not None:
            state.log_text("grpo/rollouts", table_of(*self._rollouts_to_log, self.num_generations))
        self._rollouts_to_log = None

    def _generated(self, state: State) -> Rollouts:
        """Returns the completions of the batch's prompts."""
        batch = state.batch
        prompts = prompts_of(batch, self.num_generations)
        seeds = seeds_of(
            state.settings.seed, state.clock.batch, len(prompts) // self.num_generations,
            self.num_generations, state.data_rank, state.data_world_size,
        )  # fmt: skip
        with evaluation_mode(state):
            state.batch = batch
            rollouts: Rollouts = state.precision.under_autocast(state.call)(
                "rollout", prompts, seeds
            )
        state.batch = batch
        rollouts.to(state.device)
        rollouts.prompts = texts_of(rollouts.prompt_ids, rollouts.prompt_mask, self._tokenizer)
        rollouts.completions = texts_of(
            rollouts.completion_ids, rollouts.completion_mask, self._tokenizer
        )
        return rollouts

    def _judged(self, state: State, rollouts: Rollouts) -> dict[str, Tensor]:
        """Returns a row for each completion, with its advantage."""
        size = self.num_generations
        rewards = summed(state.call("reward", rollouts), len(rollouts), state.device)
        advantages = scaled(rewards, size, self.scale_rewards, state.all_gather)
        # Logged before the rows are masked: truncated completions belong to the mean reward, too.
        state.log("grpo/reward", rewards.mean(), reduce="mean")
        state.log("grpo/reward_std", rewards.view(-1, size).std(1).mean(), reduce="mean")
        if state.rank == 0 and self._interval is not None:
            self._rollouts_to_log = rollouts, rewards, advantages
        return rows_of(rollouts, advantages, mask_truncated=self.mask_truncated)

    def _with_logps(self, state: State, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the log-probabilities under the generating policy and the reference, where needed."""
        # With a single update per generation the policy hasn't changed yet: `_loss` uses its own values.
        if self.num_iterations * self.steps_per_generation > 1 and "old_logps" not in rows:
            rows["old_logps"] = self._logps_of_all(state, state.model, rows)
        if self._reference is not None:
            rows["reference_logps"] = self._logps_of_all(state, self._reference, rows)
        elif self.beta:
            adapted: Any = state.model
            with adapted.disable_adapter():
                rows["reference_logps"] = self._logps_of_all(state, state.model, rows)
        return rows

    def _logps_of_all(self, state: State, model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        """Returns the log-probabilities of all completions, a microbatch at a time, without gradients."""
        batch = state.batch
        num = len(rows["tokens"])
        size = state.microbatch_size or num
        compute = state.precision.under_autocast(self._logps)
        with evaluation_mode(state):
            logps = [
                compute(model, minibatch(rows, numbers))
                for numbers in torch.split(torch.arange(num, device=state.device), size)
            ]
        state.batch = batch
        return torch.cat(logps)

    def _logps(self, model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        length = rows["completion_mask"].shape[1]
        # The document mask excludes padding, and positions skip it, as in `generate`.
        attended = rows["attended"]
        inputs = model_inputs(model, {
            "input_ids": rows["tokens"],
            "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
            "document_ids": attended - 1,
        })  # fmt: skip
        logits = logits_of(model, inputs, length)
        return token_logps(logits, rows["tokens"][:, -length:], self.temperature)

    def _loss(self, state: State) -> Tensor:
        """Returns the loss of a microbatch."""
        rows = state.microbatch
        logps = self._logps(state.model, rows)
        terms = policy_loss(
            logps,
            rows.get("old_logps", logps.detach()),
            rows["advantages"],
            rows["completion_mask"],
            kind=self.loss_kind,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            unbiased_kl=self.unbiased_kl,
            reference_logps_NT=rows.get("reference_logps"),
            max_tokens=self.max_tokens,
        )
        state.log("grpo/clipped_frac", terms.clipped_frac, reduce="mean")
        if terms.kl is not None:
            state.log("grpo/kl", terms.kl, reduce="mean")
        return terms.loss


def _check_options(plugin: Grpo) -> None:
    """Raises a ValueError for an option that is out of its range."""
    min_values = {
        "num_generations": 2, "max_tokens": 1, "num_iterations": 1, "steps_per_generation": 1,
    }  # fmt: skip
    for name, min_value in min_values.items():
        value = getattr(plugin, name)
        if type(value) is not int or value < min_value:
            raise ValueError(f"{name}={value!r} is not an int of {min_value} or more")
    if plugin.top_k is not None and plugin.top_k < 1:
        raise ValueError(f"top_k={plugin.top_k!r} is not an int of 1 or more")
    for name in ("temperature", "top_p"):
        value = getattr(plugin, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} isn't a positive number")
    if plugin.top_p > 1:
        raise ValueError(f"top_p={plugin.top_p!r} isn't in (0, 1]")
    if not 0 < plugin.epsilon < 1:
        raise ValueError(f"epsilon={plugin.epsilon!r} isn't in (0, 1)")
    if plugin.epsilon_high is not None and not plugin.epsilon_high > 0:
        raise ValueError(f"epsilon_high={plugin.epsilon_high!r} isn't a positive number")
    if not 0 <= plugin.beta < math.inf:
        raise ValueError(f"beta={plugin.beta!r} isn't a finite number of 0 or more")
    for name, value, choices in (
        ("loss", plugin.loss_kind, LOSSES),
        ("scale_rewards", plugin.scale_rewards, SCALES),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")


def task(
    model: str | Callable[[], nn.Module],
    data: str | Path | Sequence[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    chat_template: Path | None = None,
    batch_size: int = 8,
    shuffle: bool = True,
    dtype: Dtype = "float32",
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    schedule: Schedule = "constant",
    warmup: str | None = None,
) -> Task:
    """Returns the task with prompts for `grpo`, whose options set how completions are judged.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the Hub; in Python also a function
            that returns the model.
        data: a .jsonl or .parquet file, or a folder of datasets; in Python also the rows. A row has a
            prompt, a text or messages; or messages, up to the last of an assistant. Its further entries
            are columns of the rollouts.
        tokenizer: folder or name of the tokenizer, if it isn't in the model's folder; in Python also
            the tokenizer.
        chat_template: a file with a template that replaces the tokenizer's.
        batch_size: number of prompts in a batch, on each rank.
        shuffle: whether to reshuffle the rows in each epoch.
        dtype: dtype of the weights; auto: as saved.
        lr: highest learning rate.
        weight_decay: weight decay of AdamW.
        schedule: how the learning rate falls after the warmup.
        warmup: how long the learning rate rises.
    """
    tokenizer = tokenizer_of(model, tokenizer, chat_template)
    rows, name = read_rows(data)
    prompts = made_of_rows(rows, name, partial(_prompt, Conversations(tokenizer)))
    loader: DataLoader[Any] = DataLoader(
        prompts,  # type: ignore[arg-type]
        batch_size, shuffle=shuffle, collate_fn=partial(_batch, tokenizer.pad_token_id),
    )  # fmt: skip
    return ModelTask(
        tokenizer=tokenizer,
        model=model_maker(model, dtype),
        forward=_unjudged,
        train_dataloader=loader,
        **training(
            lr=lr, weight_decay=weight_decay, schedule=schedule, warmup=warmup, max_duration="1ep"
        ),
    )


def _unjudged(model: nn.Module, batch: Any) -> NoReturn:
    raise TaskError("the plugin grpo is off", fix="give " + as_option("grpo", num_generations=8))


def _prompt(conversations: Conversations, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of a row's prompt, and the row's further entries."""
    prompt = row.get("prompt", row.get("messages"))
    if prompt is None:
        raise ValueError(f"it has {', '.join(map(repr, row)) or 'nothing'}; give a prompt")
    if "prompt" not in row and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    columns = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    return columns | {"input_ids": conversations.prompt_ids(prompt, row.get("tools"))}


def _batch(pad_id: int, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns prompts padded on the left, and the columns that every prompt of the batch has."""
    ids = [torch.tensor(prompt["input_ids"]) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    padded_ids = pad(ids, padding_value=pad_id)
    mask = pad([torch.ones_like(ids_of_prompt) for ids_of_prompt in ids])
    names = set.intersection(*map(set, prompts)) - {"input_ids", "attention_mask"}
    columns = {name: [prompt[name] for prompt in prompts] for name in sorted(names)}
    return columns | {"input_ids": padded_ids, "attention_mask": mask}
