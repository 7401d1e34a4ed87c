"""The examples: each is run as its first lines say, only smaller."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import shutil
import struct
import sys
import zlib
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from eventloop import TaskError, Trainer, hookimpl
from eventloop.cli import main
from eventloop.distributed import rank_variables
from eventloop_testing import isolated_trainer, pretend_device, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
# Options with which an example learns something within seconds, and for how long.
TINY = {
    "digits": ({"width": 4}, "2ep"),
    "charlm": ({"width": 32, "depth": 1, "context": 32, "num_files": 17}, "50_000tok"),
    "glyphs": ({"width": 4, "num_train": 520, "num_test": 52, "label_noise": 0.0}, "6ep"),
    "gan": ({"lr": 0.005, "width": 8}, "4ep"),
    "reinforce": ({"num_walkers": 64}, "150ba"),
    "ppo": ({"num_carts": 8, "width": 32}, "30ba"),
    "graph": ({"num_people": 200}, "100ba"),
    "finetune": ({"width": 4}, "2ep"),
    "losses": ({"width": 32}, "3ep"),
    "tbptt": ({"width": 16}, "3ep"),
    "hf_text": ({"lr": 0.01, "width": 32, "depth": 1, "max_lines": 60}, "100ba"),
}

REWARDED = ("gan", "reinforce", "ppo")  # whose losses aren't to fall

every_example = pytest.mark.parametrize("name", TINY)


@pytest.fixture
def example(clean):
    """Imports a copy of an example, which is forgotten afterwards."""

    def example(name):
        path = Path(shutil.copy(EXAMPLES / f"{name}.py", clean))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return example


def test_every_example_is_run():
    """One that is added is run the day it is added."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TINY.keys()


@every_example
def test_an_example_runs_as_it_says(name, clean, capsys):
    """From the command, with options of its own; its first lines have the command to paste."""
    text = (EXAMPLES / f"{name}.py").read_text()
    options, _ = TINY[name]
    flags = [f"--task.{option}={value}" for option, value in options.items()]
    shutil.copy(EXAMPLES / f"{name}.py", clean)

    status = main(["fit", f"{name}.py", "--device=cpu", "--max-duration=2ba", "--no-plugins",
                   "--eval-interval=none", *flags])  # fmt: skip

    assert status == 0
    assert "2 batches in" in capsys.readouterr().out
    assert f"\neventloop fit examples/{name}.py\n" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in TINY if name not in REWARDED])
def test_an_examples_loss_falls(name, example, make_plugin):
    """In a fraction of its time, by more than chance would have it fall."""
    options, duration = TINY[name]
    losses = []
    watch = make_plugin("watch", batch_end=lambda state: losses.append(state.loss.item()))

    with Trainer(example(name).task(**options), max_duration=duration, device="cpu",
                 autoload=False, callbacks=[watch], eval_interval=None) as trainer:  # fmt: skip
        trainer.fit()

    tenth = len(losses) // 10
    assert sum(losses[-tenth:]) < 0.9 * sum(losses[:tenth])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "what", "least"),
    [("reinforce", "reward", 0.75), ("ppo", "ppo/steps_balanced", 60.0)],
)
def test_an_agent_learns_what_is_rewarded(name, what, least, example, clean):
    """The door is found, the pole stands; at first neither is."""
    options, duration = TINY[name]
    logged = []

    class Reads:
        name = "reads"

        @hookimpl
        def log(self, state, numbers, at):
            logged.append(float(numbers[what]))

    with Trainer(example(name).task(**options), max_duration=duration, device="cpu",
                 autoload=False, callbacks=[Reads()], log_interval="1ba") as trainer:  # fmt: skip
        trainer.fit()

    assert len(logged) == int(duration.removesuffix("ba"))
    assert logged[0] < least / 2
    assert sum(logged[-5:]) / 5 > least


def bits_apart(example, name, folder):
    """Trains 10 batches on the CPU and on the pretend accelerator; returns the greatest difference."""
    for variable in rank_variables(0, 1, 0):
        os.environ.pop(variable)
    # On the CPU attention has a kernel of its own, with other last bits.
    with sdpa_kernel(SDPBackend.MATH):
        there = pretend_device(draws_from_host=True)
        one, other = (trained_on(example, name, folder, device) for device in (None, there))
    return max((a - b.cpu()).abs().max().item() for a, b in zip(one, other, strict=True))


def trained_on(example, name, folder, device):
    options, given = TINY[name][0], {"max_duration": "10ba", "eval_interval": None}
    with contextlib.nullcontext("cpu") if device is None else device as chosen:
        made = example(name).task(**options)
        place = folder / str(chosen).partition(":")[0]
        with isolated_trainer(
            place, made, device=str(chosen), precision="fp32", **given
        ) as trainer:
            trainer.fit()
        return [one.detach().cpu() for one in trainer.state.model.parameters()]


@pytest.mark.sampled(6)
@every_example
def test_an_example_has_the_cpus_bits_on_the_pretend_accelerator(name, example, tmp_path):
    """No tensor is left on the other device, no race is in it, and no copy is read too early."""
    (difference,) = run_ranks(bits_apart, example, name, tmp_path, world_size=1)

    assert difference == 0


def trained_in_parts(folder, make, duration, *untils, **settings):
    """Trains, a process for each part; returns the weights."""
    for until in (*untils, None):
        given = {"max_duration": duration, "checkpoint_interval": "1ba", "eval_interval": None}
        with isolated_trainer(folder, make(), **given | settings) as trainer:
            trainer.fit(until=until)
    return [one.detach().clone() for one in trainer.state.model.parameters()]


# Options, and sizes of microbatches: two make what they learn from in `forward`.
WHOLE, SLICED = (None,), (None, 5)
STOPPED = {
    "reinforce": ({}, WHOLE),
    "ppo": ({"num_carts": 4, "num_steps": 8}, SLICED),
    "graph": ({"num_people": 60}, WHOLE),
    "tbptt": ({"width": 4}, SLICED),
    "losses": ({"width": 8}, SLICED),
    "glyphs": ({"width": 2, "num_train": 200, "num_test": 26}, SLICED),
    "finetune": ({"width": 2, "thaw": "2ba"}, SLICED),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "options", "microbatch_size"),
    [(name, options, size) for name, (options, sizes) in STOPPED.items() for size in sizes],
)
def test_an_example_that_was_stopped_goes_on_to_the_bit(
    name, options, microbatch_size, example, tmp_path
):
    """Agents with their worlds, frozen parts, memories: what each keeps is in the checkpoint."""
    module = example(name)

    def trained(folder, *untils):
        make = functools.partial(module.task, **options)
        return trained_in_parts(folder, make, "6ba", *untils, microbatch_size=microbatch_size)

    whole = trained(tmp_path / "whole")

    stopped = trained(tmp_path / "stopped", "2ba", "3ba")

    assert all(map(torch.equal, whole, stopped))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ppo", "tbptt", "losses"])
def test_microbatches_give_the_gradient_of_the_whole(name, example, tmp_path):
    """Minibatches that a plugin puts into the batch are sliced, and weighed, as others are."""
    module = example(name)
    options = {"num_carts": 4, "num_steps": 8, "width": 8} if name == "ppo" else {"width": 8}
    make = functools.partial(module.task, **options)

    whole = trained_in_parts(tmp_path / "whole", make, "2ba")
    sliced = trained_in_parts(tmp_path / "sliced", make, "2ba", microbatch_size=5)

    for one, other in zip(whole, sliced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ppo", "reinforce", "tbptt"])
def test_two_ranks_have_worlds_of_their_own_and_one_policy(name, example, tmp_path):
    """Without a data set each rank draws by itself; gradients are averaged all the same."""
    options = {"num_carts": 4, "num_steps": 8} if name == "ppo" else {}
    make = functools.partial(example(name).task, **options)

    one, other = run_ranks(trained_in_parts, tmp_path / "ranks", make, "4ba", "2ba")

    assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, one, trained_in_parts(tmp_path / "alone", make, "4ba")))


def test_a_backbone_is_taken_from_a_run_and_partly_stays(example, tmp_path):
    """Its first layer is that of the digits after training, too; the rest has moved on."""
    digits, finetune = example("digits"), example("finetune")
    with isolated_trainer(tmp_path / "digits", digits.task(width=2), max_duration="2ba") as trainer:
        trainer.fit()
        weights = trainer.export(tmp_path / "digits.safetensors")
        kept = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}

    task = finetune.task(width=2, weights=str(weights), thaw="1ba")
    with isolated_trainer(tmp_path / "odd", task, max_duration="4ba") as trainer:
        trainer.fit()
        found = trainer.state.model.backbone.state_dict()

    assert torch.equal(found["0.weight"], kept["0.weight"])
    assert not torch.equal(found["4.weight"], kept["4.weight"])


def test_bits_a_character_are_a_mean_over_all_of_them(example):
    """Whatever the batches; a blind guess among 128 costs 7 bits."""
    charlm = example("charlm")
    logits_BTV = torch.randn(5, 4, 128, generator=torch.Generator().manual_seed(0))
    targets_BT = torch.arange(20).reshape(5, 4)
    metric, blind = charlm.BitsPerCharacter(), charlm.BitsPerCharacter()

    metric.update(logits_BTV[:2], targets_BT[:2])
    metric.update(logits_BTV[2:], targets_BT[2:])
    blind.update(torch.zeros(5, 4, 128), targets_BT)

    expected = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()) / math.log(2)
    assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-6)
    assert blind.compute().item() == pytest.approx(7.0)


def test_the_small_gpt_does_not_see_what_comes(example):
    """It would have to guess nothing: a change of a character changes no logits before it."""
    torch.manual_seed(0)
    model = example("charlm").GPT(width=32, depth=2, num_heads=2)
    text_BT = torch.randint(128, (1, 8))
    changed_BT = text_BT.clone()
    changed_BT[0, 5] += 1

    before, after = model(text_BT), model(changed_BT)

    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_text_is_cut_without_loss_or_overlap(example):
    """Each piece's targets are its inputs, one further; held-out files aren't others'."""
    charlm = example("charlm")
    loader = charlm.task(num_files=17, context=16).train_dataloader
    windows = loader.dataset

    inputs, targets = zip(*(windows[idx] for idx in range(50)), strict=True)

    assert torch.equal(torch.cat(inputs), windows.text[: 50 * 16])
    assert torch.equal(torch.cat(targets), windows.text[1 : 50 * 16 + 1])
    assert windows.text.max() < charlm.NUM_CHARACTERS


@pytest.mark.nightly
def test_another_part_of_the_text_may_be_held_out(example):
    """So that rates are chosen by other files than those that a result is about; all are used."""
    charlm = example("charlm")

    def texts(held_out):
        task = charlm.task(num_files=32, held_out=held_out)
        loaders = task.train_dataloader, task.eval_dataloaders["held_out"]
        return [bytes(loader.dataset.text) for loader in loaders]

    (train, test), (other_train, other_test) = texts(0), texts(8)

    assert test not in train
    assert other_test not in other_train
    assert test[:5000] in other_train
    assert len(train) + len(test) == len(other_train) + len(other_test)


def test_without_transformers_the_example_says_what_to_install(example, monkeypatch):
    """It is nobody's dependency."""
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(TaskError, match=r"isn't installed\n  fix  python -m pip install transf"):
        example("hf_text")


def share_recognised(generator):
    """How many of 500 drawn digits look most like the mean of the class they were asked for."""
    images, labels = load_digits(return_X_y=True)
    means = torch.stack([torch.tensor(images[labels == k]).mean(0) for k in range(10)]).float()
    asked = torch.arange(500) % 10
    with torch.no_grad():
        drawn = generator(torch.randn(500, 32, generator=torch.Generator().manual_seed(1)), asked)
    nearest = torch.cdist(drawn.flatten(1), means / 8 - 1).argmin(1)
    return (nearest == asked).float().mean().item()


@pytest.mark.nightly
def test_the_digits_drawn_are_those_asked_for(example):
    """In a fraction of its time; the control is the generator before."""
    options, duration = TINY["gan"]
    with Trainer(example("gan").task(**options), max_duration=duration, device="cpu",
                 autoload=False) as trainer:  # fmt: skip
        generator = trainer.state.model.generator
        before = share_recognised(generator)
        trainer.fit()

    assert before < 0.3
    assert share_recognised(generator) > 0.7


@pytest.mark.nightly
def test_two_ranks_train_one_pair_of_networks(example, clean):
    """From noise and digits of their own; without the averages they would drift apart."""
    gan = example("gan")

    def train():
        with Trainer(gan.task(width=4), max_duration="3ba", device="cpu", precision="bf16",
                     autoload=False, run_dir=clean / "run") as trainer:  # fmt: skip
            trainer.fit()
            noise = torch.rand(1, generator=trainer.state.generator("adversarial")).item()
            return noise, [one.clone() for one in trainer.state.model.parameters()]

    (noise, weights), (other_noise, other_weights) = run_ranks(train)

    assert noise != other_noise
    assert all(map(torch.equal, weights, other_weights))
    assert [path.name for path in (clean / "run").glob("*.png")] == ["digits-00003.png"]


def test_the_picture_is_a_png_of_its_tensor(example, tmp_path):
    """Read back by the format's own rules: sizes, checksums, a filter's zero before each row."""
    gan = example("gan")
    grey = gan.tiled(torch.linspace(-1, 1, 2 * 10 * 64).reshape(2, 10, 1, 8, 8), zoom=2)

    gan.write_png(tmp_path / "made.png", grey)

    signature, chunks = read_chunks((tmp_path / "made.png").read_bytes())
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    assert signature == b"\x89PNG\r\n\x1a\n"
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (200, 40, 8, 0, 0, 0, 0)
    assert torch.equal(rows.reshape(40, 201)[:, 1:], grey)
    assert not rows.reshape(40, 201)[:, 0].any()


def read_chunks(data):
    chunks, start = {}, 8
    while start < len(data):
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 8 + length
        chunks[kind] = data[start + 8 : end]
        assert struct.unpack_from(">I", data, end)[0] == zlib.crc32(data[start + 4 : end])
        start = end + 4
    return data[:8], chunks
