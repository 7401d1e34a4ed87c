"""What the tests share: a tiny Llama, a tokenizer of words, chats, and trainings of them, TRL's too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import eventloop_llm.sft
from eventloop import Task, hookimpl
from eventloop.toolbox import sharded
from eventloop_testing import isolated_trainer

WORDS = [f"w{idx}" for idx in range(56)]
SPECIAL = ["<pad>", "<bos>", "<end>", "<unk>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message.role }}> {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }} <end>{% endgeneration %} {% else %}"
    "{{ message.content }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj"]


def tokenizer(template: str = TEMPLATE) -> Any:
    """Each word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {one: idx for idx, one in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(ids, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)


def llama(**changes: Any) -> nn.Module:
    """The same weights each time, without advancing the global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | changes))
    torch.set_rng_state(state)
    return model


def with_adapters(*, are_trained: bool = True) -> nn.Module:
    """The same model with adapters of peft; those that are trained add something."""
    import peft

    state = torch.get_rng_state()
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=not are_trained
    )
    model = peft.get_peft_model(llama(), config)
    torch.set_rng_state(state)
    return model


MODELS = {"full": llama, "LoRA": with_adapters}


def text(seed: int, num: int = 0) -> str:
    """Words that a seed draws."""
    generator = torch.Generator().manual_seed(seed)
    num = num or 2 + int(torch.randint(6, (), generator=generator))
    return " ".join(WORDS[idx] for idx in torch.randint(len(WORDS), (num,), generator=generator))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(seed: int, num_turns: int = 1) -> dict[str, Any]:
    """A chat of so many questions and answers."""
    messages = []
    for idx in range(num_turns):
        messages.append(turn("user", text(1000 * seed + 2 * idx)))
        messages.append(turn("assistant", text(1000 * seed + 2 * idx + 1)))
    return {"messages": messages}


CHATS = [chat(seed, 1 + seed % 3) for seed in range(14)]
COMPLETIONS = [{"prompt": text(seed), "completion": " " + text(seed + 50)} for seed in range(14)]


def sft_task(rows: Any = CHATS, model: Any = llama, **options: Any) -> Task:
    """The task with an optimizer whose steps are as large as gradients are."""
    options = {"tokenizer": tokenizer(), "max_length": 48, "batch_size": 6, "lr": 0.1} | options
    made = eventloop_llm.sft.task(model, rows, warmup=None, **options)
    made.optimizer = sgd
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is trained, whole, on the host; every rank must call it."""
    return {
        name: (one if sharded(one) is None else sharded(one).full_tensor()).detach().cpu().clone()
        for name, one in model.named_parameters()
        if one.requires_grad
    }


def trained(
    folder: Any, *plugins: Any, settings: Any = None, change: Any = None, **options: Any
) -> Any:
    """Trains; returns the weights.

    Args:
        settings: what `isolated_trainer` takes.
        change: is called with the task.
        options: what `sft_task` takes.
    """
    made = sft_task(**options)
    if change is not None:
        change(made)
    given = {"max_duration": "2ep", "clip_norm": 1.0} | (settings or {})
    with isolated_trainer(folder, made, algorithms=plugins, **given) as trainer:
        trainer.fit()
        return weights(trainer.state.model)


class Losses:
    """Keeps the loss of each batch as it is logged."""

    name = "losses"

    def __init__(self) -> None:
        self.found: list[float] = []

    @hookimpl
    def log(self, state: Any, numbers: Any, at: Any) -> None:
        self.found += [value for name, value in numbers.items() if name == "train/loss"]
