"""Which kernels compute: deterministic runs, tuned convolutions, channels_last."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from eventloop.training.performance_settings import Deterministic, TunedConvolutions

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def switches() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(VARIABLE),
    )


@pytest.fixture
def conv_task(make_task):
    """Makes a task with two convolutions, a frozen layer and images of 8 by 8."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(12, 4, 8, 8, generator=generator)
    batches = [(images[idx : idx + 4], torch.arange(4) % 3) for idx in range(0, 12, 4)]

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    def conv_task(**given):
        return make_task(**{"model": make_model, "train_dataloader": batches} | given)

    return conv_task


def test_a_deterministic_run_sets_torch_and_close_puts_it_back(make_trainer, make_plugin):
    """What a process computes afterwards is none of the run's business."""
    seen = []
    watch = make_plugin("watch", batch_start=lambda state: seen.append(switches()[:3]))
    before = switches()
    trainer = make_trainer(callbacks=[watch], deterministic=True)

    trainer.fit()
    trainer.close()

    assert set(seen) == {(True, False, False)}
    assert switches() == before
    assert "cudnn.benchmark" in trainer.notes[0]


def test_a_failure_while_building_puts_torch_back(make_trainer, make_task):
    """No trainer is left that could be closed."""
    before = switches()

    with pytest.raises(ZeroDivisionError):
        make_trainer(make_task(model=lambda: 1 / 0), deterministic=True)

    assert switches() == before


def test_what_a_person_set_before_is_put_back(make_trainer):
    """Warnings instead of errors, say."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        make_trainer(deterministic=True).close()
        assert switches()[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_on_a_gpu_cublas_gets_a_workspace(make_trainer, monkeypatch):
    """Torch refuses to be deterministic there without; a value of one's own stays."""
    monkeypatch.delenv(VARIABLE, raising=False)

    trainer = make_trainer(algorithms=[Deterministic()])
    inside = os.environ.get(VARIABLE)
    trainer.close()

    assert (inside, os.environ.get(VARIABLE)) == (":4096:8", None)


def test_two_deterministic_runs_are_the_same_bit_by_bit(make_trainer, conv_task):
    """That is what it is for; another seed is the control."""
    weights = []
    for seed in (0, 0, 1):
        trainer = make_trainer(conv_task(), deterministic=True, precision="bf16", seed=seed)
        trainer.fit()
        weights.append(torch.cat([one.flatten() for one in trainer.state.model.parameters()]))

    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_tuned_convolutions_are_for_the_run_alone(make_trainer, make_plugin, monkeypatch):
    """The switch is torch's, and everybody's."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # of accelerators it is on
    seen = []
    watch = make_plugin("watch", batch_start=lambda state: seen.append(switches()[2]))
    trainer = make_trainer(algorithms=[TunedConvolutions(), watch])

    trainer.fit()
    trainer.close()

    assert set(seen) == {True}
    assert torch.backends.cudnn.benchmark is False


def test_convolutions_compute_channels_last_under_bf16(make_trainer, conv_task):
    """Weights are enough: the batch and every shape and name stay."""
    trainer = make_trainer(conv_task(), precision="bf16")
    model, layouts = trainer.state.model, []
    for one in model[:4]:
        one.register_forward_hook(
            lambda module, inputs, outputs: layouts.append(
                outputs.is_contiguous(memory_format=torch.channels_last)
            )
        )

    trainer.fit()

    assert trainer.notes == ("channels_last: 2 convolutions, because of bf16",)
    assert layouts == [True] * 12
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("given", [{"deterministic": True}, {"precision": "fp32"}], ids=str)
def test_the_layout_stays_where_it_would_not_help_or_is_not_wanted(given, make_trainer, conv_task):
    """In fp32 it is often slower, and a deterministic run has nothing that chooses."""
    trainer = make_trainer(conv_task(), **{"precision": "bf16"} | given)

    assert trainer.state.model[0].weight.is_contiguous()
    assert not any("channels_last:" in note for note in trainer.notes)


def test_a_model_without_convolutions_has_no_note(make_trainer):
    """Nothing was changed, so nothing is said."""
    assert make_trainer(precision="bf16").notes == ()


def test_channels_last_changes_nothing_but_rounding(make_trainer, conv_task, tmp_path):
    """The layout isn't the method; and its weights are exported as they always are."""
    weights = []
    for deterministic in (False, True):
        trainer = make_trainer(conv_task(), precision="bf16", deterministic=deterministic)
        trainer.fit()
        weights.append(dict(trainer.state.model.named_parameters()))
        trainer.export(tmp_path / "weights.safetensors")
        trainer.load_weights(tmp_path / "weights.safetensors")

    torch.testing.assert_close(*weights, rtol=0, atol=2e-3, check_stride=False)


def test_the_first_layer_of_a_3d_model_stays(make_trainer, make_task):
    """The layout is one of four dimensions; a volume has five."""
    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Flatten(2), nn.Unflatten(2, (4, 2)),
                          nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # fmt: skip
    batch = (torch.randn(2, 1, 2, 2, 2), torch.tensor([0, 1]))

    trainer = make_trainer(make_task(model=model, train_dataloader=[batch]), precision="bf16")
    trainer.fit()

    assert trainer.notes == ("channels_last: 1 convolution, because of bf16",)
