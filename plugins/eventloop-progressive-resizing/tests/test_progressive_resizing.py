"""The plugin in a training."""

import operator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from eventloop import PluginError, SettingError, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_check import Check
from eventloop_progressive_resizing import ProgressiveResizing, resize, resize_mask
from eventloop_testing import case, differences, isolated_trainer, run_ranks, tiny_task

NUM_BATCHES = 10  # in two epochs
# At 2 a batch: two small ones, then a step of four pixels every second batch, then whole ones.
GIVEN = {"initial_scale": 0.25, "start": "2ba", "end": "8ba", "size_increment": 4}
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]


def batches():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, 4, 1, 16, 16, generator=generator)
    return [(one, one.mean((1, 2)).argmax(1) % 3) for one in images]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


def image_task(**given):
    values = {"train_dataloader": batches(), "eval_dataloaders": {"test": batches()[:1]}}
    return tiny_task(**values | {"model": make_model} | given)


class Sizes:
    """Keeps what training and evaluation see."""

    def __init__(self):
        self.trained, self.evaluated, self.batches = [], [], []

    @hookimpl
    def before_train_batch(self, state):
        self.trained.append(state.inputs.shape[-1])
        self.batches.append((state.inputs.cpu(), state.targets.cpu()))

    @hookimpl
    def eval_before_forward(self, state):
        self.evaluated.append(state.inputs.shape[-1])


def fit(folder, *algorithms, task=None, **given):
    given = {"max_duration": "2ep"} | given
    plugins = algorithms or (ProgressiveResizing(**GIVEN),)
    with isolated_trainer(folder, task or image_task(), algorithms=plugins, **given) as trainer:
        trainer.fit()
    return trainer


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()]).cpu()


SEEN = Sizes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose images grow; `SEEN` has seen them."""
    return fit(tmp_path_factory.mktemp("trained"), ProgressiveResizing(**GIVEN), SEEN)


def weights_by_hand(sizes):
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (images, targets), size in zip(batches() * 2, sizes, strict=True):
        images = resize(images, (size, size)) if size < 16 else images
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_images_grow_and_are_whole_at_the_end(trained):
    """Small until the start, in steps of the increment, whole from the end on."""
    assert SEEN.trained == SIZES


def test_evaluation_sees_whole_images(trained):
    """Numbers of different epochs have to be comparable."""
    assert SEEN.evaluated == [16, 16]


def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(trained):
    """The plugin resizes, and nothing else."""
    torch.testing.assert_close(weights(trained), weights_by_hand(SIZES), rtol=0, atol=1e-6)
    assert not torch.allclose(weights(trained), weights_by_hand([16] * NUM_BATCHES), atol=1e-4)


@pytest.mark.parametrize("given", [{"microbatch_size": 3}, {"precision": "bf16"},
                                   {"precision": "fp16"}], ids=str)  # fmt: skip
def test_microbatches_and_precision_change_only_rounding(tmp_path, trained, given):
    """The whole batch is resized once, in the type that the data have."""
    actual = weights(fit(tmp_path, **given))

    atol = 2e-2 if "precision" in given else 1e-6
    torch.testing.assert_close(actual, weights(trained), rtol=0, atol=atol)


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_the_closure_of_a_step_sees_the_same_images(tmp_path, mode):
    """A window that was drawn anew would give another loss."""
    seen = []

    class Twice:
        @hookimpl(wrapper=True)
        def optimizer_step(self, state, optimizers, closure):
            seen.append((state.loss.clone(), closure()))
            return (yield)

    fit(tmp_path, ProgressiveResizing(**GIVEN, mode=mode), Twice(), microbatch_size=2)

    assert len(seen) == NUM_BATCHES
    assert all(torch.equal(first, repeated) for first, repeated in seen)


def test_a_step_reads_nothing_from_the_device(tmp_path):
    """Sizes are known from the clock, on the host."""
    check = Check()

    fit(tmp_path, ProgressiveResizing(**GIVEN, mode="crop"), observers=[check])

    assert [str(one) for one in check.findings] == []


def masked(num_classes=None):
    """Batches whose targets are masks."""
    shape = (5, 4, 16, 16)
    masks = torch.randint(3, shape, generator=torch.Generator().manual_seed(1))
    if num_classes:
        masks = nn.functional.one_hot(masks, num_classes).movedim(-1, 2).float()
    return [(images, mask) for (images, _), mask in zip(batches(), masks, strict=True)]


@pytest.mark.parametrize("num_classes", [None, 3])
def test_masks_shrink_with_their_images(tmp_path, num_classes):
    """Class indices (B, H, W) or shares (B, C, H, W)."""
    seen, data = Sizes(), masked(num_classes)
    model = lambda: nn.Conv2d(1, 3, 3, padding=1)  # noqa: E731
    task = image_task(model=model, train_dataloader=data, eval_dataloaders=None, metrics={})

    fit(tmp_path, ProgressiveResizing(**GIVEN), seen, task=task)

    for (images, mask), (whole, whole_mask), size in zip(
        seen.batches, data * 2, SIZES, strict=True
    ):
        if size == 16:
            # A device has copies.
            same = operator.is_ if case.default_device == "cpu" else torch.equal
            assert same(images, whole)
            assert same(mask, whole_mask)
        else:
            assert torch.equal(images, resize(whole, (size, size)))
            assert torch.equal(mask, resize_mask(whole_mask, (size, size)))


def test_a_window_is_cut_alike_from_image_and_mask(tmp_path):
    """And is another one for each batch."""
    numbers = torch.arange(256).reshape(1, 1, 16, 16).expand(4, -1, -1, -1)
    data = [(numbers.float(), numbers[:, 0])] * 5
    seen = Sizes()
    task = image_task(
        model=lambda: nn.Conv2d(1, 256, 1), train_dataloader=data, eval_dataloaders=None, metrics={}
    )

    fit(tmp_path, ProgressiveResizing(**GIVEN, mode="crop"), seen, task=task)

    assert seen.trained == SIZES
    assert all(torch.equal(images[:, 0].long(), mask) for images, mask in seen.batches)
    assert len({int(mask[0, 0, 0]) for _, mask in seen.batches}) > 3


def of_rank(folder):
    """Trains with half of each batch, as two ranks do; a list is shared out by batches."""
    halves = [tuple(part[i : i + 2] for part in batch) for batch in batches() for i in (0, 2)]
    return weights(fit(folder, task=image_task(train_dataloader=halves)))


def test_two_ranks_end_with_the_weights_of_one(tmp_path, trained):
    """The size comes from the clock, which is the same on both."""
    first, second = run_ranks(of_rank, tmp_path)

    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(trained), rtol=0, atol=1e-6)


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


def saved(folder, stop=-1, seed=0):
    """Trains on windows, with a checkpoint every second batch; may be stopped inside of one."""
    plugins = (ProgressiveResizing(**GIVEN, mode="crop"), StopsAt(stop))
    fit(folder, *plugins, microbatch_size=3, checkpoint_interval="2ba", seed=seed)


def last(folder):
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*"))).parts


def test_stopped_and_resumed_it_ends_with_the_same_bits(tmp_path):
    """In the middle of an epoch and of the growth: sizes and windows go on."""
    saved(tmp_path / "whole")
    with pytest.raises(Stops):
        saved(tmp_path / "stopped", 3)
    early = last(tmp_path / "stopped")

    saved(tmp_path / "stopped")

    whole = last(tmp_path / "whole")
    assert list(differences(whole, last(tmp_path / "stopped"))) == []
    assert list(differences(whole, early)) != []


@pytest.mark.nightly
def test_few_graphs_are_compiled(tmp_path, trained):
    """The first size, then one graph for all others: torch makes sizes that change symbols."""
    counters.clear()
    torch._dynamo.reset()
    given = {"compile": {"backend": "eager", "fullgraph": True}, "eval_interval": None}

    actual = weights(fit(tmp_path, **given))

    torch.testing.assert_close(actual, weights(trained), rtol=0, atol=1e-6)
    assert len(set(SIZES)) == 4
    assert counters["stats"]["unique_graphs"] <= 3


UNSUITABLE = {
    "not a pair of inputs, torch.float32 of shape (4, 3), and targets, torch.int64": tiny_task,
    "one tensor of shape (4, 1, 16, 16)": lambda: image_task(
        train_dataloader=[images for images, _ in batches()]
    ),
    "torch.uint8 of shape (4, 1, 16, 16)": lambda: image_task(
        train_dataloader=[(images.byte(), targets) for images, targets in batches()]
    ),
    "targets, torch.float32 of shape (4, 7, 4)": lambda: image_task(
        train_dataloader=[(images, torch.zeros(4, 7, 4)) for images, _ in batches()]
    ),
    "the model doesn't take images of 4 x 4: mat1 and mat2": lambda: image_task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
    ),
    "the model doesn't take images of 4 x 4: mat1 and mat2 shapes cannot": lambda: image_task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    ),
    "images of 3 x 3 have no smaller multiple of 4": lambda: image_task(
        train_dataloader=[(images[..., :3, :3], targets) for images, targets in batches()]
    ),
}


@pytest.mark.parametrize(("reason", "make_task"), UNSUITABLE.items(), ids=range(len(UNSUITABLE)))
def test_it_stands_off_where_it_cannot_work(tmp_path, reason, make_task):
    """Who asked for it learns why; where it is merely installed, the run goes on without it."""
    with pytest.raises(PluginError, match="doesn't suit this task") as told:
        fit(tmp_path, task=make_task())

    assert reason in str(told.value)


class Updates:
    """Owns `train_batch`, and computes its loss by itself."""

    name = "updates"

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: state.model(state.inputs).mean())


def test_it_stands_off_where_images_may_be_compared(tmp_path):
    """A GAN's drawn images stay whole: small real ones would give them away."""
    with pytest.raises(PluginError, match="train_batch is updates's"):
        fit(tmp_path, ProgressiveResizing(**GIVEN), Updates())


def test_a_run_without_a_length_has_no_share(tmp_path):
    """`fit(until=...)` says too late what half of it is; batches can be counted in any run."""
    with pytest.raises(PluginError, match="whose max_duration isn't set"):
        fit(tmp_path, ProgressiveResizing(), max_duration=None)
    with isolated_trainer(
        tmp_path / "counted", image_task(), algorithms=[ProgressiveResizing(**GIVEN)],
        max_duration=None,
    ) as trainer:  # fmt: skip
        trainer.fit(until="1ep")

    assert trainer.state.clock.batch == 5


def test_a_model_that_only_the_task_can_call_is_not_judged(tmp_path):
    """With the whole image it fails, too, so that the failure says nothing of sizes."""

    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, images, gain):
            return gain * self.inner(images)

    task = image_task(model=TwoInputs, forward=lambda model, inputs: model(inputs, 2.0))

    assert fit(tmp_path, task=task).state.clock.batch == NUM_BATCHES


def test_a_later_batch_without_images_is_an_error(tmp_path):
    """The first one was fine; leaving this one whole in silence would be wrong."""
    data = [batches()[0], (torch.zeros(4, 16), torch.zeros(4).long())]

    with pytest.raises(PluginError, match=r"images of shape \(B, C, H, W\)"):
        fit(tmp_path, task=image_task(train_dataloader=data))


def test_times_in_the_wrong_order_are_refused(tmp_path):
    """When the trainer is built."""
    with pytest.raises(SettingError, match="start=2ep isn't before end=1ep"):
        fit(tmp_path, ProgressiveResizing(start="2ep", end="1ep"))


@pytest.mark.parametrize(
    ("given", "error", "shown"),
    [
        ({"initial_scale": 1.0}, ValueError, "initial_scale=1.0"),
        ({"initial_scale": 0}, ValueError, "initial_scale=0"),
        ({"initial_scale": "0.5"}, TypeError, "initial_scale='0.5'"),
        ({"size_increment": 0}, ValueError, "size_increment=0"),
        ({"size_increment": 2.5}, TypeError, "size_increment=2.5"),
        ({"mode": "pad"}, ValueError, "mode='pad'"),
        ({"end": "half"}, ValueError, "'half' is not a time"),
    ],
)
def test_options_without_a_meaning_are_refused(given, error, shown):
    """With the value that was seen."""
    with pytest.raises(error, match=shown):
        ProgressiveResizing(**given)


def test_a_run_that_ends_before_images_are_whole_says_so(tmp_path):
    """The network was trained on nothing that evaluation sees; `1dur` is the end itself."""
    with pytest.warns(
        UserWarning, match="ended before images reached full size, end=9ep; give an earl"
    ):
        fit(tmp_path / "late", ProgressiveResizing(end="9ep"), max_duration="1ep")

    fit(tmp_path, ProgressiveResizing(end="1dur"), max_duration="1ep")
