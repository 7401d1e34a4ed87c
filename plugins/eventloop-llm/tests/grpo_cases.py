"""What the tests share: a small Llama by configuration, prompts of digits, a reward, and runs that end early."""

from __future__ import annotations

import contextlib

import torch
from run_cases import Ends
from torch.utils.data import DataLoader

from eventloop import Task, hookimpl
from eventloop.toolbox import local
from eventloop_llm.grpo import Grpo
from eventloop_testing import isolated_trainer

PAD, END = 0, 1
VOCABULARY, NUM_PROMPTS = 13, 12


def llama(seed=3, **more):
    """Returns a model whose weights are those of a seed, as those of a file would be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": PAD,
            "eos_token_id": END, "bos_token_id": 2, "initializer_range": 0.3,
        } | more
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.set_rng_state(generator_state)
    return model


def prompts(num=NUM_PROMPTS):
    """Prompts of different lengths, padded on the left, each with a digit that is wanted."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for idx, ids in enumerate(torch.randint(3, VOCABULARY, (num, 5), generator=generator)):
        mask = (torch.arange(5) >= idx % 3).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "wanted": int(ids[-1])})
    return rows


def wanted(rollouts):
    """The share of the tokens that are the wanted digit, and how many there are."""
    tokens, mask = rollouts.completion_ids, rollouts.completion_mask
    digits = torch.stack([*rollouts.columns["wanted"]])[:, None]
    return ((tokens == digits) * mask).sum(1) - 0.1 * mask.sum(1)


class EndsInRollout(Ends):
    """Ends a run before a batch, or in the rollout of one, on all ranks."""

    free_options = ("batch", "in_rollout")

    def __init__(self, batch=None, in_rollout=None):
        super().__init__(batch)
        self.in_rollout = in_rollout

    @hookimpl
    def reward(self, state, rollouts):
        if state.clock.batch == self.in_rollout:
            raise EOFError


class Seen:
    """Notes the completions of each batch, and the losses."""

    name = "seen"

    def __init__(self):
        self.completions, self.losses = {}, []

    @hookimpl
    def reward(self, state, rollouts):
        self.completions[state.clock.batch] = rollouts.completion_ids.clone()

    @hookimpl
    def after_train_batch(self, state):
        self.losses.append(float(state.loss))


def grpo(**more):
    return Grpo(**{"num_generations": 3, "reward": wanted, "max_tokens": 6} | more)


def prompts_task(batch_size=4, lr=0.02, model=llama, shuffle=True):
    return Task(
        model=model,
        train_dataloader=lambda: DataLoader(prompts(), batch_size, shuffle),
        optimizer=lambda model: torch.optim.AdamW(
            [one for one in model.parameters() if one.requires_grad], lr=lr
        ),
        settings={"max_duration": "1ep"},
    )


def trainer_of(
    folder, *plugins, batch=None, in_rollout=None, model=llama, batch_size=4, lr=0.02, **given
):
    task = prompts_task(batch_size, lr, model, given.pop("shuffle", True))
    given = {"max_duration": "2ep", "checkpoint_interval": "1ba", "clip_norm": 1.0} | given
    return isolated_trainer(
        folder, task, algorithms=[*plugins, EndsInRollout(batch, in_rollout)], **given
    )


def fit(folder, *plugins, **given):
    """Trains; gives what this rank holds of the weights."""
    with contextlib.suppress(EOFError), trainer_of(folder, *plugins, **given) as trainer:
        trainer.fit()
    return {
        name: local(one).cpu().clone() for name, one in trainer.state.model.state_dict().items()
    }
