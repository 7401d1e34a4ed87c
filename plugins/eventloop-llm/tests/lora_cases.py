"""What the tests share: a small Llama by configuration, its data, and runs that end early."""

from __future__ import annotations

import contextlib

import torch
from run_cases import Ends
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from eventloop import Task
from eventloop.toolbox import local
from eventloop_testing import isolated_trainer

TOKENS = torch.randint(3, 32, (24, 6), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": one, "labels": one} for one in TOKENS]
TARGETS = ["q_proj", "v_proj"]


def llama(seed=3):
    """Returns a model whose weights are those of a seed, as those of a file would be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.set_rng_state(generator_state)
    return model


def classifier(seed=3):
    """Two layers that repeat, for what needs no transformer."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
    torch.set_rng_state(generator_state)
    return model


def trainer_of(folder, *plugins, batch=None, model=llama, batch_size=8, shuffle=True, **given):
    is_llama = model is not classifier
    inputs = TOKENS.float() / 32
    pairs = [(one, one.argmax()) for one in inputs]
    task = Task(
        model=model,
        loss=None if is_llama else cross_entropy,
        train_dataloader=lambda: DataLoader(DATA if is_llama else pairs, batch_size, shuffle),
        optimizer=lambda model: torch.optim.AdamW(
            [one for one in model.parameters() if one.requires_grad], lr=0.01
        ),
    )
    given = {"max_duration": "2ep", "checkpoint_interval": "2ba"} | given
    return isolated_trainer(folder, task, algorithms=[*plugins, Ends(batch)], **given)


def fit(folder, *plugins, export=None, **given):
    """Trains; gives what this rank holds of the weights, on the host."""
    with contextlib.suppress(EOFError), trainer_of(folder, *plugins, **given) as trainer:
        trainer.fit()
        if export is not None:
            trainer.export(export)
    return {
        name: local(one).clone().cpu() for name, one in trainer.state.model.state_dict().items()
    }


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))
