"""The plugin in a training."""

import copy
import itertools
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, linear

from eventloop import Task, hookimpl
from eventloop_cutmix import Cutmix
from eventloop_distill import Distill, soft_loss
from eventloop_label_smoothing import LabelSmoothing
from eventloop_mixup import Mixup
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


class Teacher(nn.Module):
    """Counts its passes, and would give other outputs were it in training mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs)
        assert not torch.is_grad_enabled()
        return self.norm(self.linear(inputs)) * 3


@pytest.fixture
def train(tmp_path):
    """Trains for two epochs; gives the trainer."""
    numbers = itertools.count()

    def train(*algorithms, task=None, **settings):
        folder = tmp_path / str(next(numbers))
        settings = {"max_duration": "2ep", "algorithms": algorithms} | settings
        with isolated_trainer(folder, task or tiny_task(), **settings) as trainer:
            trainer.fit()
        return trainer

    return train


def weights(trainer):
    return torch.cat([one.detach().flatten() for one in trainer.state.model.parameters()]).cpu()


def tiny_model():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def weights_by_hand(temperature=4.0, teacher=None, build_model=tiny_model):
    """Trains with half of each loss, and no part of eventloop."""
    teacher = teacher or Teacher().eval()
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in tiny_batches() * 2:
        with torch.no_grad():
            teachers = teacher(inputs)
        logits = model(inputs)
        loss = cross_entropy(logits, targets) + soft_loss(logits, teachers, temperature)
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(train, size):
    """The plugin must be the paper's method, however the batch is cut into microbatches."""
    teacher = Teacher()
    before = copy.deepcopy(teacher.state_dict())

    actual = weights(train(Distill(teacher=teacher), microbatch_size=size))

    torch.testing.assert_close(actual, weights_by_hand(), rtol=0, atol=1e-6)
    assert not torch.allclose(weights_by_hand(temperature=1.0), actual, atol=1e-4)
    torch.testing.assert_close(teacher.cpu().state_dict(), before, rtol=0, atol=0)


def test_a_named_teacher_with_weights_is_that_teacher(train, tmp_path, monkeypatch):
    """A file, a module and an instance must be the same teacher, whatever it was drawn as."""
    expected = weights(train(Distill(teacher=Teacher())))
    monkeypatch.syspath_prepend(tmp_path / "lib")
    file = tmp_path / "lib" / "large.py"
    file.parent.mkdir()
    file.write_text(
        "from torch import nn\n"
        "class Large(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)\n"
        "    def forward(self, inputs):\n"
        "        return self.norm(self.linear(inputs)) * 3\n"
    )
    saved = tmp_path / "teacher.safetensors"
    save_file(Teacher().state_dict(), saved)

    of_file = weights(train(Distill(teacher=f"{file}:Large", weights=saved)))
    of_module = weights(train(Distill(teacher="large:Large", weights=saved)))

    assert torch.equal(of_file, expected)
    assert torch.equal(of_module, expected)
    assert not torch.equal(weights(train(Distill(teacher="large:Large"))), expected)


def test_the_teacher_belongs_to_nobody_else(train):
    """Neither model nor optimizer nor checkpoint has it; evaluation doesn't ask it."""
    teacher = Teacher()
    state = train(Distill(teacher=teacher)).state

    in_optimizer = {id(one) for one in state.optimizers["sgd"].param_groups[0]["params"]}

    assert list(state.model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not in_optimizer & {id(one) for one in teacher.parameters()}
    assert state.wrapped_model is state.model
    assert len(teacher.seen) == 6
    assert not teacher.training


class Recorder:
    """Keeps what the model sees of each batch, and the loss, also the closure's."""

    name = "recorder"

    def __init__(self):
        self.inputs, self.losses = [], []

    @hookimpl
    def before_forward(self, state):
        self.inputs.append(state.inputs.clone())

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        self.losses.append((state.loss.clone(), closure()))
        return (yield)


def test_the_closure_of_a_step_has_the_same_loss(train, no_device_reads):
    """And nothing in a step waits for the device."""
    recorder = Recorder()

    train(Distill(teacher=Teacher()), recorder, microbatch_size=3, observers=[no_device_reads])

    assert len(recorder.losses) == 6
    for first, repeated in recorder.losses:
        torch.testing.assert_close(repeated, first)


@pytest.mark.parametrize("blend", [Mixup(alpha=1.0), LabelSmoothing()], ids=["mixup", "smoothing"])
def test_the_teacher_sees_what_the_model_sees_once(train, blend):
    """Mixed inputs have mixed outputs; a second pass for the second targets would be waste."""
    teacher, recorder = Teacher(), Recorder()
    task = tiny_task(eval_dataloaders=None, metrics=None)
    distill = Distill(teacher=teacher)
    one = train(distill, blend, recorder, task=task)

    del recorder.losses
    expected = [inputs for inputs in recorder.inputs for _ in range(2)]  # with the closure's

    torch.testing.assert_close(teacher.seen, expected, rtol=0, atol=0)
    other = train(blend, Recorder(), Distill(teacher=Teacher()), task=task)
    assert torch.equal(weights(one), weights(other))


def test_the_teachers_part_is_added_outside_of_a_second_loss(train):
    """By name cutmix would stand before it, and have the part computed for both of its losses."""
    images = [(inputs[:, None, None], targets) for inputs, targets in tiny_batches()]
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3))  # noqa: E731
    task = tiny_task(model=model, train_dataloader=images, eval_dataloaders=None, metrics=None)
    plugins = [Distill(teacher=model()), Cutmix(), Mixup(), LabelSmoothing()]

    ordered = train(*plugins, task=task).assembly.implementations["loss"]

    wrappers = [one.plugin.name for one in ordered if one.wrapper]
    assert wrappers == ["distill", "cutmix", "label-smoothing", "mixup"]


def test_who_looks_at_a_whole_batch_sees_no_teacher(train):
    """Samples are selected by the task's loss; the teacher's pass would be waste."""
    teacher, seen = Teacher(), []

    class Looks:
        name = "looks"

        @hookimpl
        def before_train_batch(self, state):
            state.outputs = state.call("forward")
            seen.append((state.call("loss"), cross_entropy(state.outputs, state.targets)))

    train(Distill(teacher=teacher), Looks())

    assert len(seen) == len(teacher.seen) == 6
    assert all(torch.equal(found, expected) for found, expected in seen)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_about_the_same(train, precision):
    """The teacher computes under autocast, too; the divergence in single precision."""
    expected = weights(train(Distill(teacher=Teacher())))

    actual = weights(train(Distill(teacher=Teacher()), precision=precision, microbatch_size=3))

    torch.testing.assert_close(actual, expected, rtol=0, atol=0.03)
    assert not torch.allclose(weights(train(precision=precision)), expected, atol=0.03)


@pytest.mark.nightly
def test_a_compiled_run_ends_with_the_same_weights(train):
    """The teacher takes the model's place, and must not take that of the compiled one."""
    expected = weights(train(Distill(teacher=Teacher())))

    actual = weights(train(Distill(teacher=Teacher()), compile={"backend": "eager"}))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_two_ranks_end_with_the_weights_of_one(train):
    """Each rank's teacher sees what its model sees; DDP knows of none of it."""
    batches = tiny_batches(4)
    pairs = zip(batches[::2], batches[1::2], strict=True)
    whole = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in pairs]
    expected = weights(train(Distill(teacher=Teacher()), task=tiny_task(train_dataloader=whole)))
    task = tiny_task(train_dataloader=batches)

    found = run_ranks(lambda: weights(train(Distill(teacher=Teacher()), task=task)))

    for actual in found:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


class Named(nn.Linear):
    """Takes a mapping, gives a mapping, as models of transformers do."""

    def forward(self, inputs, labels=None):
        logits = super().forward(inputs)
        return {"logits": logits, "loss": cross_entropy(logits, labels)}


@pytest.mark.parametrize("kind", ["mapping", "own forward"])
def test_the_teacher_is_called_as_the_model_is(train, kind):
    """Only the task knows how; a mapping's loss is the model's own."""
    batches, given = tiny_batches(), {}
    if kind == "mapping":
        batches = [{"inputs": inputs, "labels": targets} for inputs, targets in batches]
    else:
        batches = [(inputs, targets, "more") for inputs, targets in batches]
        given["forward"] = lambda model, batch: model(batch[0], batch[1])
    task = Task(
        model=lambda: Named(3, 3),
        train_dataloader=batches,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        **given,
    )
    torch.manual_seed(5)
    teacher = Named(3, 3)
    copied = {name: weight.detach().clone() for name, weight in teacher.named_parameters()}
    logits_of_teacher = partial(linear, **copied)
    expected = weights_by_hand(teacher=logits_of_teacher, build_model=lambda: nn.Linear(3, 3))

    actual = weights(train(Distill(teacher=teacher), task=task))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights(train(task=task)), expected, atol=1e-3)


def llama(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, initializer_range=1.0, **shape, **heads))


def test_a_causal_language_model_learns_where_the_next_token_is_a_label(train):
    """Its loss compares each position with the next label: of an answer of 2 tokens, the 2 before."""
    ids = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    student, teacher = llama(0), llama(1)
    with torch.no_grad():
        logits, teachers = (one(input_ids=ids).logits for one in (student, teacher))
    task = Task(
        model=student,
        train_dataloader=[{"input_ids": ids, "labels": labels}],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
    )

    trainer = train(Distill(teacher=teacher, weight=1.0), task=task, max_duration="1ba")

    expected = soft_loss(logits[:, 3:5], teachers[:, 3:5], 4.0)
    loss = trainer.state.train_metrics["loss"]
    torch.testing.assert_close(loss.float().cpu(), expected, rtol=0, atol=1e-5)


def test_a_named_teacher_draws_nobodys_random_numbers(tmp_path):
    """Its first weights come from the global generator, which the order of the data comes from."""
    draws = []
    for idx, name in enumerate([None, "torch.nn:Identity", f"{__name__}:drawing"]):
        algorithms = [Distill(teacher=name)] if name else []
        with isolated_trainer(tmp_path / str(idx), algorithms=algorithms):
            draws.append(torch.rand(3))

    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def drawing():
    torch.rand(100)
    return nn.Identity()


class Ends:
    """An algorithm that ends a run in the middle of a batch."""

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def test_a_run_that_goes_on_ends_with_the_same_bits(train, tmp_path):
    """There is nothing to save: the teacher is named again, and nothing in it moves."""
    given = {"run_dir": tmp_path / "run", "checkpoint_interval": "2ba"}
    expected = weights(train(Distill(teacher=Teacher()), Ends()))
    with pytest.raises(EOFError):
        train(Distill(teacher=Teacher()), Ends(4), **given)

    actual = weights(train(Distill(teacher=Teacher()), Ends(), **given))

    assert torch.equal(actual, expected)
    assert not torch.equal(weights(train(Ends())), expected)
