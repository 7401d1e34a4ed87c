"""Compiling: one region, the same results, and plugins that see and change what lies between."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchmetrics.classification import MulticlassAccuracy

from eventloop import TaskError, hookimpl
from eventloop.errors import SettingError
from eventloop_mixup import Mixup

EAGER = {"backend": "aot_eager"}  # the graphs are captured and differentiated, not generated


@pytest.fixture(autouse=True)
def fresh():
    """What other tests compiled neither counts nor helps."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def trained(make_trainer, make_task, make_batches):
    """Trains three epochs; gives the trainer."""

    def trained(compile=EAGER, algorithms=(), task=None, **given):
        task = task or make_task(
            model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)),
            eval_dataloaders=make_batches(),
            metrics={"accuracy": MulticlassAccuracy(3)},
        )
        given = {"max_duration": "3ep"} | given
        trainer = make_trainer(task, algorithms=[make() for make in algorithms], compile=compile,
                               **given)  # fmt: skip
        try:
            trainer.fit()
        except EOFError:
            trainer.close()  # its checkpoints are complete then
            raise
        return trainer

    return trained


def weights(trainer):
    return dict(trainer.state.model.named_parameters())


class DoublesOutputs:
    @hookimpl
    def after_forward(self, state):
        state.outputs = state.outputs * 2


class WritesIntoOutputs:
    @hookimpl
    def after_forward(self, state):
        state.outputs.mul_(2)


class ReplacesTargets:
    @hookimpl
    def before_loss(self, state):
        state.targets = (state.targets + 1) % 3


class PenalisesOutputs:
    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield) + 0.1 * state.outputs.square().mean()


class BackwardThroughOutputs:
    @hookimpl
    def after_loss(self, state):
        state.loss = state.loss + 0.1 * state.outputs.square().mean()


class LossTwice:
    @hookimpl(wrapper=True)
    def loss(self, state):
        first = yield
        return first + state.again()


class ForwardTwice:
    @hookimpl(wrapper=True)
    def forward(self, state):
        yield
        return state.again()


class OwnsLoss:
    @hookimpl
    def loss(self, state):
        return (state.outputs**2).mean()


class OwnsForward:
    @hookimpl
    def forward(self, state):
        return state.wrapped_model(state.inputs) / 2


class SometimesLoss:
    @hookimpl(conditional=True)
    def loss(self, state):
        return state.outputs.square().mean() if state.clock.batch % 2 else None


PLUGINS = [
    (), (Mixup,), (DoublesOutputs,), (WritesIntoOutputs,), (ReplacesTargets,), (PenalisesOutputs,),
    (BackwardThroughOutputs,), (LossTwice,), (ForwardTwice,), (OwnsLoss,),
    (SometimesLoss,), (Mixup, DoublesOutputs, PenalisesOutputs),
]  # fmt: skip


@pytest.mark.sampled(24)
@pytest.mark.parametrize("algorithms", PLUGINS, ids=lambda one: "+".join(a.__name__ for a in one))
@pytest.mark.parametrize("given", [{}, {"precision": "bf16", "microbatch_size": 3}], ids=str)
def test_a_compiled_run_is_the_same_run(algorithms, given, trained):
    """Whatever plugins do between forward and backward, and however they call it."""
    eager = trained(False, algorithms, **given)
    compiled = trained(EAGER, algorithms, **given)

    tolerance = {"rtol": 0, "atol": 1e-3 if given else 1e-6}
    torch.testing.assert_close(weights(compiled), weights(eager), **tolerance)
    assert compiled.state.eval_metrics == eager.state.eval_metrics


def test_plugins_make_a_difference(trained):
    """Control: each of them changes the run, so that the comparison would see it missing."""
    plain = weights(trained(False))

    for algorithms in PLUGINS[1:]:
        if algorithms != (ForwardTwice,):
            with pytest.raises(AssertionError):
                torch.testing.assert_close(weights(trained(False, algorithms)), plain)


GENERATED = """
import torch
from torch import nn
from eventloop import Task, Trainer

weights = []
for compile in (False, True):
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=nn.functional.cross_entropy,
        train_dataloader=[(inputs, inputs.argmax(1))],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    given = {"device": "cpu", "autoload": False, "max_duration": "9ba", "compile": compile}
    with Trainer(task, **given) as trainer:
        trainer.fit()
    weights.append(dict(trainer.state.model.named_parameters()))
torch.testing.assert_close(*weights)
print("equal")
"""


@pytest.mark.nightly
def test_generated_code_gives_the_same_to_rounding(run_python):
    """As a person runs it: inductor, with the compiler of this machine.

    In a process of its own, since inductor imports distutils, at which setuptools takes offence.
    """
    done = run_python(GENERATED)

    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_a_plain_run_is_two_graphs_without_a_break(trained):
    """Forward with loss, and forward in evaluation; fullgraph=True raises at a break."""
    trained({**EAGER, "fullgraph": True}, max_duration="5ep")

    assert counters["stats"]["unique_graphs"] == 2
    assert counters["graph_break"] == {}


@pytest.mark.nightly
def test_many_models_in_one_process_stay_compiled(trained, make_task):
    """They run the same code; what one recompiles isn't held against the next, from torch 2.13 on."""
    activations = (nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.CELU, nn.Mish,
                   nn.Softplus, nn.Hardtanh)  # fmt: skip
    for activation in activations:
        model = nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 3))
        trained(EAGER, task=make_task(model=model), max_duration="1ep")

    is_isolated = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    assert counters["frames"]["ok"] == (10 if is_isolated else torch._dynamo.config.recompile_limit)


def test_the_region_computes_the_loss_once(trained, make_task, make_batches):
    """Where nobody comes between, `loss` gives what `forward` computed."""
    trainer = trained(EAGER)
    region = counters["stats"]["calls_captured"]
    counters.clear()
    torch._dynamo.reset()
    separate = trained(EAGER, (OwnsLoss,))

    assert trainer.notes[0].startswith("compile: forward and loss in one region")
    assert "a resumed run may differ in its last bits" in trainer.notes[0]
    assert separate.notes[0].startswith("compile: forward without the loss")
    assert region > counters["stats"]["calls_captured"]


def test_names_and_copies_of_the_model_are_as_without(trained, tmp_path):
    """A checkpoint of a compiled run loads into any other; an average copies the model."""
    trainer = trained(EAGER)
    copied = copy.deepcopy(trainer.state.model)

    assert list(trainer.state.model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(copied[0].weight, trainer.state.model[0].weight)
    trainer.load_weights(trainer.export(tmp_path / "weights.safetensors"))


def test_a_model_with_its_own_loss_is_compiled(trained, make_task, make_batches):
    """Outputs that carry a loss aren't tensor, and stay what they are."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, labels=None):
            logits = self.linear(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    batches = [{"x": x, "labels": y} for x, y in make_batches()]
    runs = [
        trained(
            compile,
            task=make_task(model=WithLoss, loss=None, train_dataloader=batches),
        )
        for compile in (False, EAGER)
    ]

    torch.testing.assert_close(*map(weights, runs), rtol=0, atol=1e-6)


def test_a_replaced_entry_of_the_outputs_is_seen(trained, make_task):
    """The outputs are the same object, and yet others."""

    class Changes:
        @hookimpl
        def after_forward(self, state):
            state.outputs["logits"] = state.outputs["logits"] * 3

    class Dicts(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs["logits"], targets)

    runs = [
        trained(compile, (Changes,), task=make_task(model=lambda: Dicts(3, 3), loss=loss))
        for compile in (False, EAGER)
    ]

    torch.testing.assert_close(*map(weights, runs), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of dynamo's own look at it
def test_errors_of_the_task_are_the_same(trained, make_task):
    """Tracing must not turn a message for people into one about tracing."""
    with pytest.raises(TaskError, match="the task has no loss"):
        trained(EAGER, task=make_task(loss=None))


class Wraps(nn.Module):
    """Stands for DDP, in one process."""

    name = "wraps"

    def __init__(self, module=None):
        super().__init__()
        self.module = module

    @hookimpl
    def wrap_model(self, state):
        return Wraps(state.model)

    def forward(self, *inputs):
        torch._dynamo.graph_break()
        return self.module(*inputs)


def test_a_wrapped_model_is_compiled_inside_its_wrapper(trained):
    """What DDP does around the model can't be traced."""
    eager, compiled = trained(False, (Wraps,)), trained({**EAGER, "fullgraph": True}, (Wraps,))

    torch.testing.assert_close(weights(compiled), weights(eager), rtol=0, atol=1e-6)
    assert compiled.notes[0].startswith("compile: the model inside Wraps")
    assert counters["stats"]["unique_graphs"] == 2  # training and evaluation
    assert "0.weight" in compiled.state.model.state_dict()


class Lends:
    """Lets another model compute in the place of the wrapped one, before it."""

    name = "lends"

    @hookimpl(wrapper=True)
    def forward(self, state):
        if state.microbatch is not None:
            wrapped, state.wrapped_model = state.wrapped_model, nn.Linear(3, 3)
            state.again()
            state.wrapped_model = wrapped
        return (yield)


def test_a_model_that_takes_the_place_for_once_is_not_compiled(trained):
    """A teacher, say; the model that is trained is compiled all the same."""
    compiled = trained(EAGER, (Wraps, Lends))

    assert counters["stats"]["unique_graphs"] == 2  # training and evaluation
    torch.testing.assert_close(weights(compiled), weights(trained(False, (Wraps,))))


class Block(nn.Module):
    """One of several that are alike, but for a number that its forward may use."""

    def __init__(self, factor=1):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, hidden):
        return hidden + self.factor * torch.tanh(self.linear(hidden))


class Blocks(nn.Module):
    """Blocks that follow each other, between two layers that aren't alike."""

    def __init__(self, factors=(1, 1, 1, 1)):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*(Block(factor) for factor in factors))

    def forward(self, inputs):
        return self.head(self.blocks(self.stem(inputs)))


LAYERS = {**EAGER, "layers": True, "fullgraph": True}


asks_for_grad = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler does


@pytest.mark.nightly
@asks_for_grad
@pytest.mark.parametrize("wrappers", [(), (Wraps,)])
def test_layers_that_are_alike_are_compiled_once(trained, make_task, make_batches, wrappers):
    """For training and for evaluation, however many there are; a copy of the model computes as well."""

    def task():
        return make_task(model=Blocks, eval_dataloaders=make_batches())

    eager, compiled = trained(False, wrappers, task()), trained(LAYERS, wrappers, task())

    torch.testing.assert_close(weights(compiled), weights(eager), rtol=0, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 2
    assert compiled.notes[0].startswith(
        "compile: 4 layers, each compiled separately, backend=aot_eager"
    )
    model, inputs = compiled.state.model, torch.ones(2, 3)
    torch.testing.assert_close(copy.deepcopy(model)(inputs), model(inputs))


@pytest.mark.nightly
@asks_for_grad
def test_layers_that_differ_in_a_number_are_all_compiled(trained, make_task):
    """Torch gives up after eight of the same code, unless it is told how many there are."""
    trained(LAYERS, task=make_task(model=lambda: Blocks(range(12))), max_duration="1ep")

    has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    assert counters["stats"]["unique_graphs"] == (12 if has_limit else 8)


@asks_for_grad
def test_a_model_that_takes_the_place_for_once_leaves_the_layers_compiled(trained, make_task):
    """The layers are those of the model that is trained."""
    trained(LAYERS, (Wraps, Lends), make_task(model=Blocks))

    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own, in torch 2.13
@pytest.mark.parametrize("compile", ["layers", {"layers": True}])
def test_a_model_without_layers_is_refused_before_it_is_trained(make_trainer, compile):
    """The setting would have no effect."""
    with pytest.raises(SettingError, match=r"compile by layers has no effect[\s\S]*compile=true"):
        make_trainer(compile=compile)


def test_which_layers_there_are_is_not_said_here(make_trainer):
    """It is found; a name in its place would be taken for yes."""
    with pytest.raises(SettingError, match="layers is true or false, not 'Block'"):
        make_trainer(compile={"layers": "Block"})


class Updates:
    """Samples without gradients, and makes two updates of each batch, as GRPO does."""

    name = "updates"
    free_options = ("stop",)
    optimizers = None

    def __init__(self, stop=None):
        self.stop = stop

    @hookimpl
    def train_batch(self, state):
        if state.clock.batch == self.stop:
            raise EOFError
        inputs, targets = state.batch
        with torch.no_grad():
            for num in (1, 2, 3):  # other shapes, which would each be compiled
                old = state.model(inputs[:num])
        for _ in range(2):
            state.batch = (inputs + 0.01 * old.mean(), targets)
            stepped = state.update(self.loss_of, self.optimizers)
        return stepped

    def loss_of(self, state):
        inputs, targets = state.microbatch
        return nn.functional.cross_entropy(state.model(inputs), targets)


class UpdatesByName(Updates):
    """Names the one optimizer that there is."""

    optimizers = ("sgd",)


@pytest.mark.sampled(2)
@asks_for_grad
@pytest.mark.parametrize("owner", [Updates, UpdatesByName])
@pytest.mark.parametrize("compile", [EAGER, LAYERS])
def test_updates_of_a_plugin_are_compiled(owner, compile, trained, make_task, make_batches):
    """The model where it computes gradients, once; names and results are those without."""
    task = {"model": Blocks, "eval_dataloaders": make_batches()}

    compiled = trained(compile, (owner,), make_task(**task))
    plain = trained(False, (owner,), make_task(**task))

    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[name], weight, rtol=0, atol=1e-6)
    assert counters["stats"]["unique_graphs"] >= 1
    assert compiled.state.model.state_dict().keys() == plain.state.model.state_dict().keys()
    kind = (
        "4 layers, each compiled separately"
        if compile is LAYERS
        else "the model, where updates call it"
    )
    assert any(note.startswith(f"compile: {kind}") for note in compiled.notes)


@asks_for_grad
def test_passes_that_sample_are_not_compiled(trained):
    """Each word of a completion has another shape: a graph for each would take minutes."""
    trained(EAGER, (Updates,), eval_interval=None)

    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.nightly
@asks_for_grad
def test_updates_that_are_compiled_are_resumed(trained, tmp_path):
    """With a back end that generates no kernels, to the bit."""
    with pytest.raises(EOFError):
        stopped = {"checkpoint_interval": "2ba", "run_dir": tmp_path / "stopped"}
        trained(EAGER, (lambda: Updates(stop=5),), **stopped)

    checkpoint = tmp_path / "stopped" / "checkpoints" / "ba00000004"
    resumed = trained(EAGER, (Updates,), resume=str(checkpoint), run_dir=tmp_path / "resumed")

    for name, weight in weights(trained(EAGER, (Updates,))).items():
        assert torch.equal(weights(resumed)[name], weight)


def test_a_plugin_that_owns_forward_leaves_nothing_to_compile(trained):
    """What it does beside computing isn't known; a setting without effect is an error."""
    with pytest.raises(SettingError, match=r"compile has no effect[^$]*owns-forward"):
        trained(EAGER, (OwnsForward,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": "x"}, "no option 'modes'; the closest is 'mode'"),
        ({"backend": "inductors"}, "no backend 'inductors'; the closest is 'inductor'"),
        ({"mode": "fast"}, "torch.compile says: "),
    ],
)
def test_options_that_torch_can_not_take_are_refused(options, message, trained):
    """When the trainer is built, not at the first step."""
    with pytest.raises(SettingError, match=message):
        trained(options)
