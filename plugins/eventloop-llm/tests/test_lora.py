"""Adapters in one process: what is trained, saved, exported and loaded."""

from __future__ import annotations

import copy
import re

import peft
import pytest
import torch
from lora_cases import TARGETS, TOKENS, classifier, fit, last, llama, trainer_of
from safetensors.torch import load_file
from torch import nn

from eventloop import CheckpointError, PluginError, TaskError, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_ema import Ema
from eventloop_llm.lora import Lora
from eventloop_llm.models.adapters import ADAPTER_WEIGHTS
from eventloop_testing import check_plugin, counted_waits, tiny_task
from eventloop_testing import pretend_device as switched_on

VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "dora": {"use_dora": True},
    "with a new head": {"modules_to_save": ["lm_head"]},
    "with dropout": {"lora_dropout": 0.2},
    "all linear layers": {"target_modules": ["all-linear"], "task_type": "CAUSAL_LM"},
}


def lora(**options):
    return Lora(**{"r": 2, "target_modules": TARGETS} | options)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS.to(model.device)).logits.cpu()


def on_host(state_dict):
    return {name: one.cpu() for name, one in state_dict.items()}


def test_it_is_what_every_plugin_must_be():
    """Options, order, closing, and a resume in the middle of an epoch, on two ranks, too."""
    check_plugin(Lora, role="algorithm", options={"r": 2, "target_modules": ["0", "2"]})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_accelerator_has_the_bits_of_the_cpu(tmp_path, variant):
    """Random numbers are drawn as on the host."""
    plugin = lambda: lora(**VARIANTS[variant])  # noqa: E731

    expected = fit(tmp_path / "cpu", plugin(), device="cpu")
    with switched_on(draws_from_host=True):
        actual = fit(tmp_path / "there", plugin(), device="pretend")

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Steps:
    """Keeps what the host waits for between the begin and the end of a step."""

    name = "a-steps"

    def __init__(self, waits):
        self.waits, self.found, self.num = waits, [], 0

    @hookimpl(tryfirst=True)
    def batch_start(self, state):
        self.num = len(self.waits)

    @hookimpl
    def batch_end(self, state):
        self.found += self.waits[self.num :]


def test_adapters_read_nothing_from_the_device(tmp_path, pretend_device):
    """The one read of a step is that of transformers, which looks for packed rows."""
    with counted_waits() as waits:
        steps = Steps(waits)
        fit(tmp_path, lora(), steps, device="pretend", checkpoint_interval=None)

    assert [one.plugin for one in steps.found] == ["transformers"] * 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_alone_are_trained_and_saved(tmp_path, variant):
    """A checkpoint of a large model takes kilobytes; its base is as it was."""
    before = llama().state_dict()
    weights = fit(tmp_path, lora(**VARIANTS[variant]))
    found = read_checkpoint(last(tmp_path))

    base = {
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".original_module", ""): one
        for name, one in weights.items()
        if "lora_" not in name and "modules_to_save" not in name
    }
    torch.testing.assert_close(base, dict(before), rtol=0, atol=0)
    saved = found.parts["model"]
    assert saved.keys() == {one for one in weights if "lora_" in one or "modules_to_save" in one}
    assert all(one.any() for name, one in saved.items() if "lora_" in name)
    assert len(found.parts["optimizers"]["adamw"]["state"]) == len(saved)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path, variant):
    """The base is built again, adapters and their optimizer state are loaded."""
    plugin = lambda: lora(**VARIANTS[variant])  # noqa: E731
    expected = fit(tmp_path / "one", plugin())
    fit(tmp_path / "two", plugin(), batch=3)

    actual = fit(tmp_path / "two", plugin())

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_another_base_model_is_refused(tmp_path):
    """Its adapters would add to weights that they weren't trained with: on resume, and to load."""
    fit(tmp_path, lora(), batch=5)
    other = {"model": lambda: llama(4)}

    with pytest.raises(CheckpointError, match="differ from the weights that it leaves out"):
        fit(tmp_path, lora(), **other)
    with (
        trainer_of(tmp_path / "other", lora(), **other) as trainer,
        pytest.raises(CheckpointError, match="differ from the weights that it leaves out"),
    ):
        trainer.load_weights(last(tmp_path))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_loads_the_folder_that_is_exported_and_so_does_load_weights(tmp_path, variant):
    """It is what peft itself writes, for the base model as it was."""
    options = VARIANTS[variant]
    weights = fit(tmp_path, lora(**options), export=tmp_path / "adapter")
    with trainer_of(tmp_path / "again", lora(**options)) as trainer:
        trainer.load_weights(tmp_path / "adapter")
        loaded = trainer.state.model

    torch.testing.assert_close(on_host(loaded.state_dict()), weights, rtol=0, atol=0)
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(loaded), rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_are_those_of_the_base_model(tmp_path, variant):
    """The file needs neither peft nor this plugin; training goes on with the adapters."""
    path = tmp_path / "new" / "merged.safetensors"
    with trainer_of(tmp_path, lora(**VARIANTS[variant], merge=True)) as trainer:
        trainer.fit()
        before = copy.deepcopy(trainer.state.model.state_dict())
        trainer.export(path)
        model = trainer.state.model
    plain = llama()
    plain.load_state_dict(load_file(path))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-6)
    assert not torch.allclose(logits(plain), logits(llama()), atol=1e-3)


def test_averages_of_adapters_are_exported(tmp_path):
    """The folder has what evaluation sees."""
    weights = fit(tmp_path, lora(), Ema(half_life="3ba"), export=tmp_path / "adapter")
    plain = fit(tmp_path / "plain", lora(), export=tmp_path / "plain-adapter")

    averaged = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    last_ones = load_file(tmp_path / "plain-adapter" / "adapter_model.safetensors")
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    assert averaged.keys() == last_ones.keys()
    state = read_checkpoint(last(tmp_path)).parts["plugins"]["ema"]["state"]
    assert len(state["averages"]) == len(averaged)
    assert not any(torch.equal(one, averaged[name]) for name, one in last_ones.items())


def several():
    """A model of peft's with two adapters, of which one is trained."""
    first = peft.LoraConfig(r=2, target_modules=TARGETS)
    second = peft.LoraConfig(r=3, target_modules=["o_proj"])
    torch.manual_seed(5)
    model = peft.get_peft_model(llama(), first, adapter_name="first")
    model.add_adapter("second", second)
    model.set_adapter("second")
    return model


def test_several_adapters_are_saved_and_exported_each_under_its_name(tmp_path):
    """The task has made them; a new one may be trained on top."""
    weights = fit(tmp_path, Lora(), model=several, export=tmp_path / "out")
    third = fit(tmp_path / "third", lora(adapter="third"), model=several)
    with trainer_of(tmp_path / "again", Lora(), model=several) as trainer:
        trainer.load_weights(tmp_path / "out")
        loaded = on_host(trainer.state.model.state_dict())

    saved = read_checkpoint(last(tmp_path)).parts["model"].keys()
    assert saved == {one for one in weights if "lora_" in one}
    assert {"first", "second"} == {one.name for one in (tmp_path / "out").iterdir() if one.is_dir()}
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
    moved = [one for one in saved if not torch.equal(weights[one], several().state_dict()[one])]
    assert moved
    assert all(".second." in one for one in moved)
    assert any(".third." in one and third[one].any() for one in third if "lora_B" in one)


def test_other_kinds_of_adapters_are_saved_alone_too(tmp_path):
    """What peft can save and load the plugin can."""

    def vera():
        config = peft.VeraConfig(r=2, target_modules=["q_proj"])
        return peft.get_peft_model(llama(), config)

    trained = fit(tmp_path, Lora(), model=vera, export=tmp_path / "out")
    with trainer_of(tmp_path / "again", Lora(), model=vera) as trainer:
        trainer.load_weights(tmp_path / "out")
        loaded = on_host(trainer.state.model.state_dict())

    torch.testing.assert_close(loaded, trained, rtol=0, atol=0)
    assert not any("base_layer" in one for one in read_checkpoint(last(tmp_path)).parts["model"])


def test_an_adapter_of_another_rank_is_refused_with_what_it_is(tmp_path):
    """The message has the options that fit."""
    fit(tmp_path, lora(), export=tmp_path / "adapter", max_duration="1ba")
    for options, what in (
        ({"r": 4}, r"of other shapes: .* is \(2, 16\), not \(4, 16\)"),
        ({"target_modules": ["q_proj", "k_proj"]}, "4 weights missing"),
        ({"target_modules": ["q_proj"]}, "4 weights that the model lacks"),
    ):
        with (
            trainer_of(tmp_path / "other", lora(**options)) as trainer,
            pytest.raises(TaskError, match=what) as caught,
        ):
            trainer.load_weights(tmp_path / "adapter")
        assert "r=2, target_modules=['q_proj', 'v_proj']" in str(caught.value)


MISTAKES = {
    "has no adapters": (Lora, llama),
    "peft can't adapt LlamaForCausalLM: Target modules": (
        lambda: lora(target_modules=["nothing"]), llama,
    ),
    "has an adapter 'first' already": (lambda: lora(adapter="first"), several),
    "has no weights yet": (
        lambda: lora(target_modules=["0"]), lambda: nn.Sequential(nn.Linear(3, 3, device="meta")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shown", MISTAKES)
def test_what_can_not_be_adapted_is_refused(tmp_path, shown):
    """Before the first batch, with what to write."""
    plugin, model = MISTAKES[shown]

    with pytest.raises(PluginError, match=shown):
        trainer_of(tmp_path, plugin(), model=model)


def test_options_without_a_rank_are_refused():
    """They would have no effect."""
    with pytest.raises(ValueError, match="without r; give one, such as r=8"):
        Lora(use_dora=True)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"r": 0}, "r=0 is not a rank; give an int of 1 or more, such as r=8"),
        ({"r": "8"}, "r='8' is not a rank"),
        (
            {"r": 2, "lora_dropout": 1.5},
            "lora_dropout=1.5 is not a share; give 0 or more, less than 1",
        ),
        ({"r": 2, "adapter": "a.b"}, "adapter='a.b' is not a name of an adapter"),
        ({"r": 2, "adapter": ""}, "adapter='' is not a name of an adapter"),
    ],
)
def test_values_that_peft_would_not_name_are_refused(options, shown):
    """A rank of 0 was one of 8, and a share of 1.5 an error about names of layers."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        Lora(**options)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("target_modules", ["q_proj", "v_prj"]),
        ("target_modules", ["q_proj", "_proj"]),  # peft takes whole names alone
        ("modules_to_save", ["lm_haed"]),
    ],
)
def test_a_layer_that_is_not_there_is_an_error(tmp_path, option, names):
    """Where another one is, peft leaves it out without a word: a head wouldn't be trained."""
    with pytest.raises(
        PluginError, match=f"{option}: no layer is named '{names[-1]}'; the closest"
    ):
        trainer_of(tmp_path, lora(**{option: names}))


def test_the_head_of_a_classifier_is_trained_whole(tmp_path):
    """To the names that it is given peft adds those of other models' heads."""
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    heads = lora(modules_to_save=["score"], task_type="SEQ_CLS")

    with trainer_of(
        tmp_path, heads, model=lambda: LlamaForSequenceClassification(config)
    ) as trainer:
        trained = [
            name for name, one in trainer.state.model.named_parameters() if one.requires_grad
        ]

    assert heads.modules_to_save == ["score"]
    assert [one for one in trained if "score" in one]


def test_the_file_of_an_adapter_stands_for_its_folder(tmp_path):
    """A path that is completed in a shell ends there."""
    fit(tmp_path, lora(), export=tmp_path / "adapter", max_duration="1ba")
    with trainer_of(tmp_path / "other", lora()) as trainer:
        trainer.load_weights(tmp_path / "adapter" / ADAPTER_WEIGHTS)
        trainer.export(tmp_path / "again")

    first, second = (load_file(tmp_path / one / ADAPTER_WEIGHTS) for one in ("adapter", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_to_draw_adapters_advances_no_other_generator(tmp_path):
    """The order of the data must not depend on how many adapters there are."""
    numbers = []
    for plugins in ([], [Lora(r=2, target_modules=["0.0"])], [Lora(r=4, target_modules=["0.0"])]):
        with trainer_of(tmp_path / str(len(numbers)), *plugins, model=classifier):
            numbers.append(torch.rand(3))

    assert all(torch.equal(one, numbers[0]) for one in numbers)


def test_a_tiny_task_reports_what_is_trained(make_trainer):
    """The header says how much of the model that is."""
    trainer = make_trainer(tiny_task(), algorithms=[Lora(r=2, target_modules=["0", "2"])])

    assert "lora: 44 of 103 parameters are trained; adapters: default" in trainer.notes
