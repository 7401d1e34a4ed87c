"""The plugin in a training."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from eventloop import PluginError, Task, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_check import Check
from eventloop_seq_length_warmup import SeqLengthWarmup, reshape, truncate
from eventloop_testing import differences, isolated_trainer, run_ranks

# 4 sequences of 12 tokens, 5 batches an epoch; whole after 6 batches.
GIVEN = {"min_length": 3, "duration": "6ba", "length_increment": 3}
LENGTHS = [3, 3, 6, 6, 9, 9, 12, 12, 12, 12]
ROWS = [16, 16, 8, 8, 4, 4, 4, 4, 4, 4]  # where sequences are reshaped


def batches():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(8, (5, 4, 13), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in text]


def make_model():
    """Returns the next token from the tokens so far: their mean up to each position."""
    return nn.Sequential(nn.Embedding(8, 6), SoFar(), nn.Linear(6, 8))


class SoFar(nn.Module):
    def forward(self, x_BTC):
        lengths = torch.arange(1, x_BTC.shape[1] + 1, device=x_BTC.device)
        return x_BTC.cumsum(1) / lengths[:, None]


def token_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_task(**given):
    values = {
        "model": make_model, "loss": token_loss, "train_dataloader": batches(),
        "eval_dataloaders": {"test": batches()[:1]}, "metrics": {},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "num_tokens": lambda inputs: inputs.numel(),
    }  # fmt: skip
    return Task(**values | given)


class Shapes:
    """Keeps what training and evaluation see, and what the clock counts."""

    def __init__(self):
        self.trained, self.evaluated, self.counts = [], [], []

    @hookimpl
    def before_train_batch(self, state):
        self.trained.append(tuple(state.inputs.shape))

    @hookimpl
    def eval_before_forward(self, state):
        self.evaluated.append(tuple(state.inputs.shape))

    @hookimpl
    def batch_end(self, state):
        self.counts.append((state.clock.sample, state.clock.token))


def fit(folder, *algorithms, task=None, **given):
    given = {"max_duration": "2ep"} | given
    plugins = algorithms or (SeqLengthWarmup(**GIVEN),)
    with isolated_trainer(folder, task or text_task(), algorithms=plugins, **given) as trainer:
        trainer.fit()
    return trainer


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()]).cpu()


SEEN = Shapes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose sequences grow; `SEEN` has seen them."""
    return fit(tmp_path_factory.mktemp("trained"), SeqLengthWarmup(**GIVEN), SEEN)


def weights_by_hand(lengths, change=truncate):
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, length in zip(batches() * 2, lengths, strict=True):
        inputs, targets = change(batch, length)
        token_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def sums(numbers):
    return torch.tensor(numbers).cumsum(0).tolist()


def test_sequences_grow_and_are_whole_in_the_end(trained):
    """And are whole in every evaluation, so that its numbers can be compared."""
    assert SEEN.trained == [(4, length) for length in LENGTHS]
    assert SEEN.evaluated == [(4, 12)] * 2


def test_the_clock_counts_what_is_trained(trained):
    """Learning rates and budgets in tokens depend on it."""
    tokens = sums([4 * length for length in LENGTHS])

    assert SEEN.counts == list(zip(sums([4] * 10), tokens, strict=True))
    assert trained.state.clock.token < 10 * 4 * 12


def test_tokens_that_are_counted_by_a_mask_are_counted_on_the_host(tmp_path):
    """Each batch is shortened before it is counted: no proportion would be exact."""
    mask = (torch.arange(12) < torch.tensor([[12], [7], [4], [1]])).long()
    ids, labels = batches()[0]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    shapes = Shapes()
    task = text_task(
        train_dataloader=[batch] * 5, eval_dataloaders=None,
        forward=lambda model, batch: model(batch["input_ids"]),
        num_tokens=lambda batch: int(batch["attention_mask"].sum()),
    )  # fmt: skip

    class Ids:
        @hookimpl
        def before_train_batch(self, state):
            shapes.trained.append({tuple(one.shape) for one in state.batch.values()})

        @hookimpl
        def batch_end(self, state):
            shapes.counts.append(state.clock.token)

    fit(tmp_path, SeqLengthWarmup(**GIVEN), Ids(), task=task)

    assert shapes.trained == [{(4, length)} for length in LENGTHS]
    assert shapes.counts == sums([int(mask[:, :length].sum()) for length in LENGTHS])


def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(trained):
    """The plugin shortens, and nothing else."""
    torch.testing.assert_close(weights(trained), weights_by_hand(LENGTHS), rtol=0, atol=1e-6)
    assert not torch.allclose(weights(trained), weights_by_hand([12] * 10), atol=1e-4)


def test_reshaped_batches_keep_their_tokens(tmp_path):
    """More and shorter sequences; samples are those that the loader gave."""
    seen = Shapes()

    reshaped = fit(tmp_path, SeqLengthWarmup(**GIVEN, mode="reshape"), seen)

    expected = weights_by_hand(LENGTHS, reshape)
    torch.testing.assert_close(weights(reshaped), expected, rtol=0, atol=1e-6)
    tokens = [rows * length for rows, length in zip(ROWS, LENGTHS, strict=True)]
    assert seen.trained == list(zip(ROWS, LENGTHS, strict=True))
    assert seen.counts == list(zip(sums([4] * 10), sums(tokens), strict=True))


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
@pytest.mark.parametrize("given", [{"microbatch_size": 3}, {"precision": "bf16"},
                                   {"precision": "fp16"}], ids=str)  # fmt: skip
def test_microbatches_and_precision_change_only_rounding(tmp_path, given, mode):
    """The whole batch is shortened once, and weighed as it is then."""
    change = {"truncate": truncate, "reshape": reshape}[mode]

    actual = weights(fit(tmp_path, SeqLengthWarmup(**GIVEN, mode=mode), **given))

    atol = 2e-2 if "precision" in given else 1e-6
    torch.testing.assert_close(actual, weights_by_hand(LENGTHS, change), rtol=0, atol=atol)


def test_the_closure_of_a_step_sees_the_same_sequences(tmp_path):
    """The clock stands still within a step."""
    seen = []

    class Twice:
        @hookimpl(wrapper=True)
        def optimizer_step(self, state, optimizers, closure):
            seen.append((state.loss.clone(), closure()))
            return (yield)

    fit(tmp_path, SeqLengthWarmup(**GIVEN), Twice(), microbatch_size=2)

    assert len(seen) == 10
    assert all(torch.equal(first, repeated) for first, repeated in seen)


def test_a_step_reads_nothing_from_the_device(tmp_path):
    """Lengths are known from shapes and the clock, on the host."""
    check = Check()

    fit(tmp_path, SeqLengthWarmup(**GIVEN, mode="reshape"), observers=[check])

    assert [str(one) for one in check.findings] == []


def of_rank(folder):
    """Trains with half of each batch, as two ranks do; a list is shared out by batches."""
    halves = [tuple(part[i : i + 2] for part in batch) for batch in batches() for i in (0, 2)]
    trainer = fit(folder, task=text_task(train_dataloader=halves))
    return weights(trainer), trainer.state.clock.token


def test_two_ranks_end_with_the_weights_and_tokens_of_one(tmp_path, trained):
    """The clock adds up what all ranks have trained on."""
    (first, tokens), (second, _) = run_ranks(of_rank, tmp_path)

    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(trained), rtol=0, atol=1e-6)
    assert tokens == trained.state.clock.token


class Stops(Exception):
    pass


class StopsAt:
    name = "stops-at"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            raise Stops


def saved(folder, stop=-1):
    """Trains for so many tokens, with a checkpoint every second batch; may be stopped inside of one."""
    given = {"max_duration": "400tok", "checkpoint_interval": "2ba", "microbatch_size": 3}
    plugin = SeqLengthWarmup(**GIVEN | {"duration": "0.5dur"})
    return fit(folder, plugin, StopsAt(stop), **given)


def last(folder):
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*"))).parts


def test_stopped_and_resumed_it_ends_with_the_same_bits(tmp_path):
    """In the middle of an epoch and of the warm-up, which is counted in the tokens themselves."""
    whole = saved(tmp_path / "whole")
    with pytest.raises(Stops):
        saved(tmp_path / "stopped", 3)
    early = last(tmp_path / "stopped")

    saved(tmp_path / "stopped")

    expected = last(tmp_path / "whole")
    assert list(differences(expected, last(tmp_path / "stopped"))) == []
    assert list(differences(expected, early)) != []
    assert 400 <= whole.state.clock.token < 400 + 48


@pytest.mark.nightly
def test_few_graphs_are_compiled(tmp_path, trained):
    """The first length, then one graph for all others: torch makes sizes that change symbols."""
    counters.clear()
    torch._dynamo.reset()
    given = {"compile": {"backend": "eager", "fullgraph": True}, "eval_interval": None}

    actual = weights(fit(tmp_path, **given))

    torch.testing.assert_close(actual, weights(trained), rtol=0, atol=1e-6)
    assert len(set(LENGTHS)) == 4
    assert counters["stats"]["unique_graphs"] <= 3


class FixedLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.places = make_model(), nn.Parameter(torch.zeros(12, 8))

    def forward(self, tokens):
        return self.inner(tokens) + self.places


UNSUITABLE = {
    "has no tensor of tokens": lambda: text_task(
        train_dataloader=[{"pixels": torch.zeros(4, 3), "labels": torch.zeros(4)}]
    ),
    "aren't one for each of 4 x 12 tokens": lambda: text_task(
        train_dataloader=[(tokens, targets[:, 0]) for tokens, targets in batches()]
    ),
    "sequences of 3 tokens are no longer than the shortest": lambda: text_task(
        train_dataloader=[truncate(one, 3) for one in batches()]
    ),
    "the model doesn't take sequences of 3 tokens: The size of": lambda: text_task(
        model=FixedLength
    ),
}


@pytest.mark.parametrize(("reason", "make_task"), UNSUITABLE.items(), ids=range(len(UNSUITABLE)))
def test_it_stands_off_where_it_cannot_work(tmp_path, reason, make_task):
    """Who asked for it learns why; where it is merely installed, the run goes on without it."""
    with pytest.raises(PluginError, match="doesn't suit this task") as told:
        fit(tmp_path, task=make_task())

    assert reason in str(told.value)


def test_a_run_without_a_length_has_no_share(tmp_path):
    """`fit(until=...)` says too late what a third of it is."""
    with pytest.raises(PluginError, match="whose max_duration isn't set"):
        fit(tmp_path, SeqLengthWarmup(), max_duration=None)


def test_a_later_batch_without_sequences_is_an_error(tmp_path):
    """The first one was fine; leaving this one whole in silence would be wrong."""
    data = [batches()[0], (torch.zeros(4, 12), torch.zeros(4).long())]

    with pytest.raises(PluginError, match=r"can't shorten a batch: torch\.float32"):
        fit(tmp_path, task=text_task(train_dataloader=data, num_tokens=None))


@pytest.mark.parametrize(
    ("given", "error", "shown"),
    [
        ({"min_length": 0}, ValueError, "min_length=0"),
        ({"min_length": 8.0}, TypeError, "min_length=8.0"),
        ({"length_increment": -1}, ValueError, "length_increment=-1"),
        ({"length_increment": True}, TypeError, "length_increment=True"),
        ({"mode": "pad"}, ValueError, "mode='pad'"),
        ({"duration": "long"}, ValueError, "'long' is not a time"),
    ],
)
def test_options_without_a_meaning_are_refused(given, error, shown):
    """With the value that was seen."""
    with pytest.raises(error, match=shown):
        SeqLengthWarmup(**given)


def test_a_run_that_ends_before_sequences_are_whole_says_so(tmp_path):
    """What evaluation sees was never trained on; `1dur` is the end itself."""
    with pytest.warns(
        UserWarning, match="before sequences reached full length, duration=9ep; give a"
    ):
        fit(tmp_path / "late", SeqLengthWarmup(duration="9ep"), max_duration="1ep")

    fit(tmp_path, SeqLengthWarmup(duration="1dur"), max_duration="1ep")
