"""Against TRL's GRPOTrainer, on the completions that it has drawn: losses and weights."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import pytest
import torch
import trl
from grpo_cases import END, PAD, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eventloop import Task, hookimpl
from eventloop_llm.grpo import Grpo
from eventloop_llm.rollouts.generation import completion_mask
from eventloop_testing import isolated_trainer, run_ranks

WORDS = ["<pad>", "<eos>", "<bos>", *(f"w{idx}" for idx in range(10))]
NUM, LENGTH, STEPS = 3, 6, 4


def tokenizer():
    made = Tokenizer(models.WordLevel({one: idx for idx, one in enumerate(WORDS)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def texts(num):
    generator = torch.Generator().manual_seed(1)
    return [
        " ".join(WORDS[idx] for idx in torch.randint(3, 13, (2 + one % 4,), generator=generator))
        for one in range(num)
    ]


def variety(completions, **_):
    return [len({*one.split()}) - 0.1 * len(one.split()) for one in completions]


class Recorded(trl.GRPOTrainer):
    """Keeps the completions of each batch, and the losses."""

    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        if not hasattr(self, "recorded"):
            self.recorded, self.losses = [], []
        self.recorded.append({name: one.clone() for name, one in found.items() if one.ndim})
        return found

    def training_step(self, *given):
        loss = super().training_step(*given)
        self.losses.append(float(loss))
        return loss


def adapted():
    """A model with adapters that don't add anything yet."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(5)
    return peft.get_peft_model(llama(), config)


def theirs(folder, monkeypatch, model=None, **more):
    """Trains by TRL: completions, losses and weights."""
    # Completions would be in another order in each of several updates.
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda one: one)
    steps = more.get("steps_per_generation", 1)
    args = trl.GRPOConfig(
        str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", gradient_checkpointing=False, learning_rate=0.05, optim="sgd",
        lr_scheduler_type="constant", per_device_train_batch_size=4 * NUM // steps,
        max_steps=STEPS * more.get("num_iterations", 1) * steps, num_generations=NUM,
        max_completion_length=LENGTH, **{"steps_per_generation": 1} | more,
    )  # fmt: skip
    rows = datasets.Dataset.from_dict({"prompt": texts(24)})
    llama().save_pretrained(folder / "base")  # from which TRL builds the reference, too
    trainer = Recorded(
        model=LlamaForCausalLM.from_pretrained(folder / "base") if model is None else model(),
        reward_funcs=variety,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer.recorded, trainer.losses, dict(trainer.model.state_dict())


class Replays:
    """Returns completions that were drawn elsewhere: a rank's share of them."""

    name = "replays"

    def __init__(self, recorded):
        self.recorded = recorded

    @hookimpl(conditional=True)
    def rollout(self, state, prompts):
        found = self.recorded[state.clock.batch]
        part = slice(None)
        if state.world_size > 1:
            idx = torch.arange(len(found["completion_ids"]) // NUM)[state.rank :: state.world_size]
            part = (idx[:, None] * NUM + torch.arange(NUM)).flatten()
        for name in ("prompt_ids", "prompt_mask", "completion_ids"):
            setattr(prompts, name, found[name][part])
        prompts.completion_mask = completion_mask(prompts.completion_ids, [END])
        # TRL takes a drawn token of padding for an end, too.
        ids = prompts.completion_ids
        prompts.is_ended = (ids == END).any(1) | (ids[:, -1] == PAD)
        return prompts


class Losses:
    """Notes the loss of each update."""

    name = "losses"

    def __init__(self):
        self.each = []

    @hookimpl
    def after_train_batch(self, state):
        self.each.append(float(state.loss))


def ours(folder, recorded, losses=None, num_ranks=1, model=llama, **more):
    """Trains on the same completions."""
    settings = {"microbatch_size": more.pop("microbatch_size", None)}
    batches = [
        {"input_ids": one["prompt_ids"][::NUM], "attention_mask": one["prompt_mask"][::NUM]}
        for one in recorded
    ]
    rows = [
        {name: one[idx] for name, one in batch.items()} for batch in batches for idx in range(4)
    ]
    # Of one length, so that a data loader of samples can share them out.
    longest = max(len(one["input_ids"]) for one in rows)
    padded = [
        {name: torch.nn.functional.pad(one, (longest - len(one), 0)) for name, one in row.items()}
        for row in rows
    ]
    task = Task(
        model=model,
        train_dataloader=lambda: torch.utils.data.DataLoader(padded, 4 // num_ranks),
        # AdamW would make steps of gradients that are rounding alone, as of a divergence from itself.
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    )
    grpo = Grpo(
        num_generations=NUM, max_tokens=LENGTH, tokenizer=tokenizer(),
        reward=lambda rollouts: variety(rollouts.completions), **more,
    )  # fmt: skip
    plugins = [grpo, Replays(recorded), *([losses] if losses else [])]
    with isolated_trainer(
        folder / "ours", task, algorithms=plugins, max_duration="1ep", clip_norm=1.0, **settings
    ) as trainer:
        trainer.fit()
        return {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}


KINDS = {
    "dapo": {"loss": "dapo"},
    "grpo, KL": {"loss": "grpo", "beta": 0.1},
    "dr_grpo": {"loss": "dr_grpo", "scale_rewards": "none"},
    "batch": {"loss": "grpo", "scale_rewards": "batch", "epsilon_high": 0.28},
    "biased": {"loss": "dapo", "num_iterations": 2, "beta": 0.1, "unbiased_kl": False},
    "iterations": {"loss": "dapo", "num_iterations": 2, "beta": 0.05},
    "updates": {"loss": "grpo", "num_iterations": 2, "steps_per_generation": 2},
    "truncated": {"loss": "grpo", "mask_truncated": True},
    "temperature": {"loss": "dapo", "temperature": 0.7},
}
THEIR_NAMES = {
    "loss": "loss_type",
    "mask_truncated": "mask_truncated_completions",
    "unbiased_kl": "use_bias_correction_kl",
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_trl(tmp_path, monkeypatch, kind):
    """On the same completions: in one piece, in microbatches, and on two ranks."""
    options = KINDS[kind]
    asked = {THEIR_NAMES.get(name, name): one for name, one in options.items()}
    recorded, their_losses, expected = theirs(tmp_path, monkeypatch, **asked)
    losses = Losses()

    actual = ours(tmp_path, recorded, losses, **options)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert losses.each == pytest.approx(their_losses, abs=1e-6)
    untrained = dict(llama().state_dict())
    assert not torch.allclose(actual["lm_head.weight"], untrained["lm_head.weight"], atol=1e-4)
    for size in (1, 3):
        parts = ours(tmp_path, recorded, microbatch_size=size, **options)
        torch.testing.assert_close(parts, expected, rtol=0, atol=2e-6)
    for one in run_ranks(lambda: ours(tmp_path, recorded, num_ranks=2, **options)):
        torch.testing.assert_close(one, expected, rtol=0, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_adapters_learn_what_they_learn_under_trl(tmp_path, monkeypatch, beta):
    """TRL keeps a copy of the adapters as the reference, which add nothing: as without any."""
    options = {"beta": beta, "num_iterations": 2}
    asked = {"loss_type": "dapo", **options}
    recorded, their_losses, expected = theirs(tmp_path, monkeypatch, adapted, **asked)
    losses = Losses()

    actual = ours(tmp_path, recorded, losses, model=adapted, **options)

    expected = {name: one for name, one in expected.items() if ".ref." not in name}
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert losses.each == pytest.approx(their_losses, abs=1e-6)
    untrained = dict(adapted().state_dict())
    name = next(one for one in actual if "lora_B" in one)
    assert not torch.allclose(actual[name], untrained[name], atol=1e-5)
