"""The plugin in a training."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, SettingError, Task, hookimpl
from eventloop_curriculum import Curriculum
from eventloop_testing import isolated_trainer, run_ranks


def dataset(samples=24):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, inputs.argmax(1))


def loader(batch_size=4, samples=24):
    return DataLoader(dataset(samples), batch_size, shuffle=True)


def task(**given):
    """Trains on 6 batches of 4 samples an epoch."""
    return Task(**{
        "model": lambda: nn.Linear(4, 4),
        "loss": cross_entropy,
        "train_dataloader": loader,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    } | given)  # fmt: skip


class Recorder:
    """Keeps how large batches are, by epoch, and how many an epoch is said to have."""

    def __init__(self):
        self.sizes, self.lengths, self.shapes = [], [], []

    @hookimpl
    def epoch_start(self, state):
        self.sizes.append([])
        self.lengths.append(state.num_batches)

    @hookimpl
    def batch_end(self, state):
        self.sizes[-1].append(len(state.inputs))
        self.shapes.append(tuple(state.inputs.shape))


def fit(folder, *algorithms, task=None, **given):
    given = {"max_duration": "3ep"} | given
    with isolated_trainer(folder, task or globals()["task"](), algorithms=algorithms, **given) as t:
        t.fit()
    return t


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()]).cpu()


def by_hand(sizes):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for size in sizes:
        for inputs, targets in loader(size):
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_a_run_ends_with_the_bits_of_a_loop_written_by_hand(tmp_path):
    """A larger batch size is another DataLoader for the epochs from then on, and no more."""
    actual = weights(fit(tmp_path, Curriculum(batch_size={"1ep": 8, "2ep": 12})))

    assert torch.equal(actual, by_hand([4, 8, 12]))
    assert not torch.equal(actual, by_hand([4, 4, 12]))


@pytest.mark.parametrize(
    ("sizes", "epochs"),
    [
        ({"1ep": 8, "2ep": 12}, [[4] * 6, [8] * 3, [12] * 2]),
        ({"0ep": 12, "1ep": 8}, [[12] * 2, [8] * 3, [8] * 3]),
        ({"5ba": 8, "7ba": 12}, [[4] * 6, [8] * 3, [12] * 2]),
        ({"0.5dur": 8}, [[4] * 6, [4] * 6, [8] * 3]),
        ({"24sp": 24}, [[4] * 6, [24], [24]]),
    ],
)
def test_a_size_is_in_force_from_the_next_epoch_on(tmp_path, sizes, epochs):
    """No epoch is cut; its length, and with it that of the run in batches, follows."""
    recorder = Recorder()

    trainer = fit(tmp_path, Curriculum(batch_size=sizes), recorder)

    assert recorder.sizes == epochs
    assert recorder.lengths == list(map(len, epochs))
    assert trainer.state.clock.batch == sum(map(len, epochs))


def test_asked_twice_it_answers_the_same(tmp_path):
    """Another plugin, or a check, may ask; the run stays as it is."""
    recorder, curriculum, answers = Recorder(), Curriculum(batch_size={"1ep": 8}), []

    class Asks:
        @hookimpl
        def epoch_end(self, state):
            answers.append([curriculum.should_rebuild_dataloader(state) for _ in range(2)])

    fit(tmp_path, curriculum, recorder, Asks())

    assert answers == [[True, True], [False, False], [False, False]]
    assert recorder.sizes == [[4] * 6, [8] * 3, [8] * 3]


LBFGS = {"optimizer": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)}


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"precision": "bf16", "microbatch_size": 3}, {}),
        ({"precision": "fp16", "microbatch_size": 3}, {}),
        ({"microbatch_size": 3}, LBFGS),
    ],
)
def test_batches_that_grow_are_split_and_cast_like_any_others(tmp_path, settings, values):
    """What happens with a batch is nobody's business here, closures included."""
    recorder = Recorder()

    trainer = fit(
        tmp_path, Curriculum(batch_size={"1ep": 8}), recorder, task=task(**values), **settings
    )

    assert recorder.sizes == [[4] * 6, [8] * 3, [8] * 3]
    assert weights(trainer).isfinite().all()


STAGES = {
    "a loader": loader(6, 12),
    "a list": [(torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64))] * 2,
    "a function": lambda state: loader(6, 12 * state.clock.epoch),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_another_data_loader_takes_the_place_of_the_tasks(tmp_path, stage):
    """Easy samples first, say; in Python anything that gives batches will do."""
    recorder = Recorder()

    fit(tmp_path, Curriculum(stages={"1ep": stage}), recorder)

    assert recorder.sizes == [[4] * 6, [6] * 2, [6] * 2]


def test_stages_and_sizes_go_together(tmp_path):
    """The size holds for whatever data loader is in force."""
    recorder = Recorder()
    curriculum = Curriculum(stages={"1ep": loader(6, 12)}, batch_size={"0ep": 8, "2ep": 3})

    fit(tmp_path, curriculum, recorder)

    assert recorder.sizes == [[8] * 3, [8, 4], [3] * 4]


class Texts(nn.Module):
    """Gives a logit for each character."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.weight


def test_shorter_sequences_are_fewer_tokens(tmp_path):
    """They are counted after the cut, so that schedules over tokens stay right."""
    recorder = Recorder()
    texts = TensorDataset(torch.randn(8, 10), torch.randn(8, 10))
    values = {
        "model": Texts,
        "loss": nn.functional.mse_loss,
        "train_dataloader": lambda: DataLoader(texts, 4),
        "num_tokens": lambda inputs: inputs.numel(),
    }

    curriculum = Curriculum(seq_len={"0ep": 2, "1ep": 5, "2ep": 10})
    trainer = fit(tmp_path, curriculum, recorder, task=task(**values))

    assert recorder.shapes == [(4, 2), (4, 2), (4, 5), (4, 5), (4, 10), (4, 10)]
    assert trainer.state.clock.token == 8 * (2 + 5 + 10)


def test_who_else_wants_another_data_loader_gets_it(tmp_path):
    """A question of two plugins has two answers; the size stays what it is by now."""

    class Asks:
        @hookimpl
        def should_rebuild_dataloader(self, state):
            return True

    recorder = Recorder()

    fit(tmp_path, Curriculum(batch_size={"1ep": 8}), Asks(), recorder)

    assert recorder.sizes == [[4] * 6, [8] * 3, [8] * 3]


def ranks_fit(folder):
    recorder = Recorder()
    curriculum = Curriculum(batch_size={"1ep": 6}, stages={"2ep": loader(4, 16)})
    trainer = fit(folder, curriculum, recorder)
    return recorder.sizes, weights(trainer), trainer.state.clock.sample


def test_ranks_share_out_what_comes(tmp_path):
    """The batch size is counted on each rank, as the data loader's; a stage is shared out, too."""
    one, other = run_ranks(ranks_fit, tmp_path)

    assert one[0] == other[0] == [[4] * 3, [6] * 2, [6, 2]]
    assert torch.equal(one[1], other[1])
    assert one[2] == 24 + 24 + 16


def test_a_time_that_comes_too_late_is_told(tmp_path):
    """In a run of a single epoch nothing would ever change, in silence."""
    with pytest.warns(UserWarning, match="the run has ended before an epoch began"):
        fit(tmp_path, Curriculum(batch_size={"2ba": 8}), max_duration="1ep")


def test_without_anything_set_it_stands_off(tmp_path):
    """Installed, it has nothing to do until somebody says what; the header names the options."""
    with pytest.raises(PluginError, match=r"nothing is set: give --curriculum.batch-size"):
        fit(tmp_path, Curriculum())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([(torch.zeros(2, 4), torch.zeros(2).long())], "it is list of 1"),
        (DataLoader(dataset(), batch_size=None), "made by the data set or by a batch sampler"),
    ],
)
def test_batches_that_cannot_be_changed_are_an_error(tmp_path, batches, message):
    """Before training, even where the time lies far ahead, is best; at the latest when it comes."""
    with pytest.raises(PluginError, match=message):
        fit(tmp_path, Curriculum(batch_size={"0ep": 8}), task=task(train_dataloader=batches))


def test_a_share_of_a_run_without_a_length_is_an_error(tmp_path):
    """With the line to write."""
    with pytest.raises(SettingError, match="write its times in epochs or batches"):
        fit(tmp_path, Curriculum(batch_size={"0.5dur": 8}), max_duration=None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 8}, TypeError, "batch_size=8 is not a mapping by time"),
        ({"batch_size": {"1ep": 0}}, ValueError, "batch_size.'1ep'. is 0, not a whole number"),
        ({"seq_len": {"1ep": 1.5}}, ValueError, "seq_len.'1ep'. is 1.5, not a whole number"),
        ({"stages": {"1ep": "easy"}}, ValueError, "stages.'1ep'. is 'easy', not a data loader"),
        ({"batch_size": {"soon": 8}}, ValueError, "'soon' is not a time"),
    ],
)
def test_an_option_without_a_meaning_is_refused(options, error, message):
    """With the value that was seen."""
    with pytest.raises(error, match=message):
        Curriculum(**options)
