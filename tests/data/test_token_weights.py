"""A model's own mean over tokens: the same step however the batch is cut, and over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from eventloop import Task, TaskError, Trainer, hookimpl
from eventloop.data.token_weights import keeps_cache, may_take
from eventloop_testing import run_ranks

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTHS = (12, 3, 7, 1, 12, 5)


def causal(family="Llama"):
    """Builds a model that compares each output with the next label."""
    import transformers

    given = {"vocab_size": 50, "intermediate_size": 16, **SIZES}
    if family == "GPT2":
        given = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        given |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        given |= {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**given))
    config = getattr(transformers, f"{family}Config")(**given, num_key_value_heads=2)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def masked(head="MaskedLM"):
    """Builds a model that compares each output with its own label."""
    import transformers

    given = {"vocab_size": 50, "intermediate_size": 16, **SIZES, **NO_DROPOUT, "num_labels": 50}
    return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**given))


def from_sequence():
    """Builds an encoder and decoder, which shifts its inputs and not its labels."""
    import transformers

    given = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    config = transformers.T5Config(**given, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "GPT-2": lambda: causal("GPT2"),
    "Llama": causal,
    "BERT": masked,
    "BERT for token classification": lambda: masked("TokenClassification"),
    "T5": from_sequence,
}


def padded(lengths=LENGTHS):
    """Makes a batch of sequences, padded to 12; where it is padded, the labels are -100."""
    ids = torch.randint(1, 50, (len(lengths), 12), generator=torch.Generator().manual_seed(1))
    is_padding = torch.arange(12) >= torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(is_padding, -100)
    return {"input_ids": ids, "attention_mask": (~is_padding).long(), "labels": labels}


def trained(build, batch=None, *, loader=None, **given):
    """Trains for a batch; returns the weights."""
    settings = {name: given.pop(name) for name in ("microbatch_size",) if name in given}
    task = Task(
        model=build,
        train_dataloader=[batch or padded()] if loader is None else loader,
        optimizer=lambda model: SGD(model.parameters(), lr=1.0),
        **given,
    )
    with Trainer(task, device="cpu", autoload=False, max_duration="1ba", **settings) as trainer:
        trainer.fit()
        return {name: one.clone() for name, one in trainer.state.model.state_dict().items()}


def assert_close(one, other):
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_microbatches_of_unequal_tokens_train_as_the_batch_in_one_piece(model, size):
    """With one sample of one token, over which a causal model has no mean."""
    build = MODELS[model]

    assert_close(trained(build), trained(build, microbatch_size=size))


def test_weights_by_samples_would_be_found_out():
    """The mean of the means isn't the mean."""
    batch = padded((12, 3, 7))
    whole = trained(causal, batch)
    by_samples = trained(causal, batch, microbatch_size=1, loss_weight=lambda: 1)

    assert max(float((by_samples[name] - one).abs().max()) for name, one in whole.items()) > 1e-3


def halves():
    """Returns the batch in two, one for each rank."""
    parts = (slice(3), slice(3, 6))
    return [{name: one[part] for name, one in padded().items()} for part in parts]


def samples():
    """Returns a data loader whose batches have as many samples on each rank, known in advance."""
    batch = padded()
    dataset = [{name: one[idx] for name, one in batch.items()} for idx in range(len(LENGTHS))]
    return DataLoader(dataset, batch_size=3)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("make", [halves, samples])
def test_two_ranks_train_as_one_process(make, size):
    """Rank 0 has other numbers of tokens than rank 1, also where both have as many samples."""
    one = trained(causal)
    for ranks in run_ranks(lambda: trained(causal, loader=make(), microbatch_size=size)):
        assert_close(one, ranks)


def test_an_evaluation_is_a_mean_over_tokens():
    """So that it doesn't depend on how the set is cut into batches; exp(loss) is the perplexity."""
    batch = padded()
    halves = [{name: one[part] for name, one in batch.items()} for part in (slice(2), slice(2, 6))]

    def loss(loader):
        task = Task(model=causal, train_dataloader=[], eval_dataloaders=loader)
        with Trainer(task, device="cpu", autoload=False) as trainer:
            return float(trainer.eval()["eval"]["loss"])

    assert math.isclose(loss([batch]), loss(halves), abs_tol=1e-6)


def test_the_header_says_so():
    """What changes what is computed is not done without a word."""
    task = Task(model=causal, train_dataloader=[padded()])
    with Trainer(task, device="cpu", autoload=False) as trainer:
        assert "loss: weighted by tokens, if labels are (N, T)" in trainer.notes


class Own(nn.Module):
    """A model of one's own with labels; over which of them its loss is a mean, only it knows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(50, 50)

    def forward(self, input_ids, labels, attention_mask=None):
        logits = self.layer(input_ids)[:, :-1]
        return {"loss": cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def test_a_model_that_may_leave_out_the_first_label_is_refused():
    """With the line to write, which then trains as one piece does."""
    with pytest.raises(TaskError, match=r"aren't known.*\n[\s\S]*loss_weight=lambda batch"):
        trained(Own, microbatch_size=2)

    def weight(batch):
        return (batch["labels"][:, 1:] != -100).sum()

    assert_close(trained(Own), trained(Own, microbatch_size=1, loss_weight=weight))


def test_an_evaluation_of_it_is_not_refused(make_trainer):
    """It would be after hours of training, which one batch in one piece doesn't ask."""
    task = Task(
        model=Own,
        train_dataloader=[padded()],
        eval_dataloaders=[padded(), padded((12, 2))],
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
    )

    assert make_trainer(task).fit().metrics["eval"]["loss"] > 0


@pytest.mark.parametrize("lengths", [(12,) * 6, (12, 12)])
def test_where_all_labels_count_nothing_has_to_be_known(lengths):
    """A mean over all, or over all but the first, is weighted alike."""
    batch = padded(lengths)

    assert_close(trained(Own, batch), trained(Own, batch, microbatch_size=1))


def test_where_no_first_label_counts_nothing_has_to_be_known():
    """A prompt is masked in every sample."""
    batch = padded()
    batch["labels"][:, 0] = -100
    batch["labels"][3, 1] = 7

    assert_close(trained(Own, batch), trained(Own, batch, microbatch_size=4))


class Weighs:
    """Records the weights of a fit."""

    name = "weighs"

    def __init__(self):
        self.weights = []

    @hookimpl(wrapper=True)
    def weigh_microbatch(self, state):
        weight = yield
        self.weights.append(weight)
        return weight


@pytest.mark.parametrize(
    ("task", "batch"),
    [
        ({"model": lambda: masked("SequenceClassification")}, {"labels": torch.arange(6)}),
        ({"model": Own, "loss": lambda outputs, targets: outputs["loss"]}, {}),
    ],
    ids=["a label a sample", "a loss of the task's"],
)
@pytest.mark.filterwarnings("ignore:microbatches of 4 train something else")
def test_what_is_no_mean_over_tokens_weighs_its_samples(task, batch):
    """The labels show it, or the loss isn't the model's own."""
    weighs = Weighs()
    task = Task(
        **task,
        train_dataloader=[padded() | batch],
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
        algorithms=[weighs],
    )
    given = {"device": "cpu", "autoload": False, "max_duration": "1ba", "microbatch_size": 4}
    with Trainer(task, **given) as trainer:
        trainer.fit()

    assert weighs.weights == [4, 2]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "GPT2"])
def test_documents_in_one_row_do_not_see_each_other(family):
    """With a cache transformers takes them for one."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    ids = torch.randint(1, 50, positions.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :5] = -100  # of the first document, and of the second's first token
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    seen = []

    class Embeddings:
        name = "embeddings"

        @hookimpl
        def after_load(self, state):
            def keep(layer, args, output):
                output.retain_grad()
                seen.append(output)

            state.model.get_input_embeddings().register_forward_hook(keep)

    trained(lambda: causal(family), batch, algorithms=[Embeddings()])

    (embedded,) = seen
    assert embedded.grad[:, :4].abs().max() == 0
    assert embedded.grad[:, 4:].abs().max() > 0


@pytest.mark.nightly
def test_a_compiled_model_is_compiled_once():
    """What is looked up at the first pass would be another graph at the second."""
    torch._dynamo.reset()
    counters.clear()
    task = Task(
        model=causal,
        train_dataloader=[padded((12, 12))] * 3,
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
    )
    settings = {"device": "cpu", "autoload": False, "compile": {"backend": "eager"}}
    with Trainer(task, **settings, max_duration="3ba") as trainer:
        trainer.fit()

    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_compiled_model_takes_what_it_takes():
    """`torch.compile` returns a module whose `forward` takes anything."""
    plain = torch.nn.Linear(2, 2)
    compiled = torch.compile(plain, backend="eager")

    assert [may_take(one, "labels") for one in (plain, compiled)] == [False, False]
    assert may_take(compiled, "input")


def test_a_compiled_model_keeps_a_cache_as_it_did():
    """With one a model of transformers doesn't see that documents are packed in a row."""

    class Cached(torch.nn.Module):
        config, loss_type, loss_function = None, "ForCausalLM", None

        def forward(self, input_ids, use_cache=True):
            return input_ids

    plain = Cached()

    assert keeps_cache(plain)
    assert keeps_cache(torch.compile(plain, backend="eager"))
