"""A callback may call the model in any event of evaluation and prediction, by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from eventloop import Task, Trainer, hookimpl
from eventloop_testing import run_ranks

EVENTS = [
    "eval_before_all",
    "eval_start",
    "eval_batch_start",
    "eval_before_forward",
    "eval_after_forward",
    "eval_batch_end",
    "eval_end",
    "eval_after_all",
]
OF_PREDICTION = ["predict_start", "predict_batch_start", "predict_batch_end", "predict_end"]


class Words(nn.Module):
    """Predicts the next of eight words; its dropout shows whether it is in training mode."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 8)

    def forward(self, ids):
        return self.head(self.dropout(self.embedding(ids)))

    def generate(self, ids, num_words=3):
        """Draws words, one after the other, from the global generator."""
        for _ in range(num_words):
            logits = self(ids)[:, -1]
            ids = torch.cat([ids, logits.float().softmax(-1).multinomial(1)], 1)
        return ids, logits


class Generates:
    """What a user writes: no mode, no weights and no rank is looked at."""

    name = "generates"

    def __init__(self, event="eval_end", rank_zero=False):
        self.seen = []
        setattr(self, event, hookimpl(rank_zero=rank_zero)(lambda state: self._generate(state)))

    def _generate(self, state):
        generate = state.precision.under_autocast(state.model.generate)
        words, logits = generate(torch.zeros(2, 1, dtype=torch.long, device=state.device))
        state.log_text("samples", {"words": [str(one) for one in words.tolist()]})
        training = any(module.training for module in state.model.modules())
        self.seen.append((training, logits.requires_grad, logits.dtype, words.shape))


def task():
    batches = [(one, one.roll(1, 1)) for one in torch.arange(48).remainder(8).reshape(6, 2, 4)]
    return Task(
        model=Words,
        loss=lambda outputs, targets: cross_entropy(outputs.flatten(0, 1), targets.flatten()),
        train_dataloader=batches,
        eval_dataloaders={"a": batches[:2], "b": batches[:1]},
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
        metrics={},
    )


def trainer_with(*callbacks, **given):
    settings = {"max_duration": "2ep", "eval_interval": "4ba", "autoload": False, "device": "cpu"}
    return Trainer(task(), callbacks=callbacks, **settings | given)


def trained(*callbacks, **given):
    """Trains 12 batches with three evaluations; returns the weights."""
    with trainer_with(*callbacks, **given) as trainer:
        trainer.fit()
        assert all(module.training for module in trainer.state.model.modules())
        return torch.cat([one.detach().flatten() for one in trainer.state.model.parameters()])


@pytest.fixture(scope="module")
def weights():
    return trained()


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_generates_in_each_event_of_an_evaluation(event, weights):
    """In a fit: without dropout, without gradients; what it draws changes no bit of the training."""
    generates = Generates(event)

    assert torch.equal(trained(generates), weights)
    assert set(generates.seen) == {(False, False, torch.float32, (2, 4))}


@pytest.mark.parametrize("event", EVENTS)
def test_so_it_does_without_a_fit(event):
    """`trainer.eval()` is what `eventloop eval` calls."""
    generates = Generates(event)

    with trainer_with(generates) as trainer:
        trainer.eval()
        assert all(module.training for module in trainer.state.model.modules())

    assert set(generates.seen) == {(False, False, torch.float32, (2, 4))}


@pytest.mark.parametrize("event", OF_PREDICTION)
def test_so_it_does_in_a_prediction(event):
    """The batch at hand may be what it goes on from."""
    generates = Generates(event)

    with trainer_with(generates) as trainer:
        trainer.predict([torch.zeros(2, 3, dtype=torch.long)])

    assert set(generates.seen) == {(False, False, torch.float32, (2, 4))}


def test_without_eval_data_too(make_trainer):
    """A callback that generates is a reason to evaluate: its prompts are all that it needs."""
    generates, prompts_alone = Generates("eval_after_all"), task()
    prompts_alone.eval_dataloaders = None

    settings = {"max_duration": "2ep", "eval_interval": "1ep", "autoload": False, "device": "cpu"}
    with Trainer(prompts_alone, callbacks=[generates], **settings) as trainer:
        trainer.fit()
        trainer.eval()

    assert len(generates.seen) == 3


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_it_computes_in_the_precision_of_the_run(precision, dtype):
    """As `eval_forward` does; calls by a callback are its own, so that it says so."""
    generates = Generates()

    trained(generates, precision=precision)

    assert {one[2] for one in generates.seen} == {dtype}


@pytest.mark.parametrize("rank_zero", [True, False])
def test_ranks_generate_alone_or_together(rank_zero):
    """The model of DDP waits for no other rank then, and the ranks' weights stay the same."""

    def train():
        generates = Generates(rank_zero=rank_zero)
        return trained(generates, uneven="drop"), len(generates.seen), trained(uneven="drop")

    (first, num, without), (second, num_other, _) = run_ranks(train)

    assert torch.equal(first, second)
    assert torch.equal(first, without)
    assert (num, num_other) == (4, 0 if rank_zero else 4)


def test_a_model_of_transformers_keeps_its_cache_while_it_generates():
    """`use_cache=False`, which forward passes of the core get, is an argument of theirs alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    ids = torch.arange(16).remainder(8).reshape(2, 8)
    batches, generated = [{"input_ids": ids, "labels": ids}] * 2, []

    class Says:
        @hookimpl
        def eval_end(self, state):
            caches = []
            hook = state.model.transformer.register_forward_hook(
                lambda module, args, output: caches.append(output.past_key_values is not None)
            )
            for use_cache in (True, False):
                words = state.model.generate(
                    ids[:, :2],
                    max_new_tokens=3,
                    do_sample=False,
                    use_cache=use_cache,
                    pad_token_id=0,
                )
                generated.append((words.tolist(), set(caches)))
                caches.clear()
            hook.remove()

    model = Task(
        model=lambda: GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)),
        train_dataloader=batches,
        eval_dataloaders={"test": batches},
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
    )
    with Trainer(
        model, callbacks=[Says()], max_duration="1ep", autoload=False, device="cpu"
    ) as trainer:
        trainer.fit()

    (with_cache, used), (without, unused) = generated
    assert with_cache == without
    assert (used, unused) == ({True}, {False})
