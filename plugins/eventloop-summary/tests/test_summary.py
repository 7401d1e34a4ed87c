"""The table, and the plugin in a training."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from eventloop import TaskError
from eventloop_summary import Passes, Summary, table
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


def model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Sequential(nn.Linear(128, 5), nn.ReLU())
    )


def looked_at(made, *inputs):
    passes = Passes(made)
    made(*inputs)
    passes.close()
    return passes.layers


def test_operations_are_those_of_torchs_own_counter():
    """Of each layer, and of all of them."""
    made, inputs = model(), torch.randn(2, 3, 6, 6)
    with FlopCounterMode(display=False) as counter:
        made(inputs)
    expected = {
        name.removeprefix("Sequential").removeprefix("."): sum(found.values())
        for name, found in counter.get_flop_counts().items()
        if name != "Global"
    }

    found = {one.name: one.flops for one in looked_at(made, inputs) if one.flops}

    assert found == expected
    assert found[""] == counter.get_total_flops() > 0


def test_parameters_and_shapes_are_those_of_the_model():
    """Shared parameters count once."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made[1].weight = made[0].weight

    layers = looked_at(made, torch.randn(3, 4))

    assert [(one.name, one.num_params, one.outputs) for one in layers] == [
        ("", 24, ((3, 4),)), ("0", 20, ((3, 4),)), ("1", 20, ((3, 4),))
    ]  # fmt: skip


def test_a_table_has_a_line_for_each_layer_down_to_a_depth():
    """A large model is read from its top."""
    layers = looked_at(model(), torch.randn(2, 3, 6, 6))

    shallow, deep = (table(layers, depth).splitlines() for depth in (1, 2))
    assert [line.split()[0] for line in shallow] == ["layer", "0", "1", "2", "3", "all"]
    assert [line.split()[0] for line in deep] == ["layer", "0", "1", "2", "3", "0", "1", "all"]
    assert shallow[1].split() == ["0", "Conv2d", "(2,", "8,", "4,", "4)", "224", "13.8", "k"]
    assert shallow[-1].split()[-3:] == ["869", "16.4", "k"]


def test_the_model_is_left_as_it_was():
    """A pass that fails, too."""
    made = model()
    passes = Passes(made)
    with pytest.raises(RuntimeError):
        made(torch.randn(2, 4, 6, 6))
    passes.close()

    assert not any(one._forward_hooks or one._forward_pre_hooks for one in made.modules())
    assert looked_at(made, torch.randn(2, 3, 6, 6))[0].flops > 0


def test_parts_of_a_model_count_where_the_whole_is_never_called():
    """As in a GAN."""
    made = nn.ModuleDict({"G": nn.Linear(3, 4), "D": nn.Linear(4, 3)})
    passes = Passes(made)
    made["D"](made["G"](torch.randn(2, 3)))
    passes.close()

    assert table(passes.layers, 1).splitlines()[-1].split() == ["all", "ModuleDict", "31", "96"]


def fit(folder, **given):
    with isolated_trainer(folder, callbacks=[Summary()], **given) as trainer:
        trainer.fit()
        return trainer.state.model.state_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("given", [{}, {"microbatch_size": 2}, {"compile": {"backend": "eager"}}])
def test_the_table_is_written_once(tmp_path, capsys, given):
    """At the first pass, whatever follows; of a compiled model with its parameters alone."""
    fit(tmp_path, max_duration="2ep", **given)

    out = capsys.readouterr().out
    assert out.count("parameters") == 1
    assert ("96" in out or "k" in out) or given


def test_looking_changes_no_bit(tmp_path):
    """Of the weights of a run."""
    found = fit(tmp_path / "with")
    with isolated_trainer(tmp_path / "without") as trainer:
        trainer.fit()
        expected = trainer.state.model.state_dict()

    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rank_0_writes(tmp_path, capfd):
    """Two tables would be in each other's way."""

    def run(folder):
        task = tiny_task(train_dataloader=tiny_batches(6))
        with isolated_trainer(folder, task, callbacks=[Summary()]) as trainer:
            trainer.fit()

    run_ranks(run, tmp_path)

    assert capfd.readouterr().out.count("parameters") == 1


def test_a_pass_that_fails_lets_the_model_go(tmp_path):
    """It may be used again."""
    task = tiny_task(model=lambda: nn.Linear(4, 3))
    with isolated_trainer(tmp_path, task, callbacks=[Summary()]) as trainer:
        with pytest.raises((RuntimeError, TaskError)):
            trainer.fit()
        assert not trainer.state.model._forward_hooks


def test_a_depth_of_nothing_is_refused():
    """It would write a line."""
    with pytest.raises(ValueError, match="depth=0"):
        Summary(depth=0)


@pytest.mark.parametrize("is_whole", [True, False])
def test_parameters_without_an_optimizer_stand_below_the_table(tmp_path, capsys, is_whole):
    """The table counts them among the parameters, and they are never trained."""

    def optimizer(model):
        return torch.optim.SGD(model.parameters() if is_whole else [model[0].weight], lr=0.1)

    task = tiny_task(optimizer=optimizer)
    with isolated_trainer(tmp_path, task, callbacks=[Summary()]) as trainer:
        trainer.fit()

    assert (
        "in no optimizer, so they stay as they are: 0.bias" in capsys.readouterr().out
    ) != is_whole


@pytest.mark.parametrize("is_frozen", [True, False])
def test_modules_in_evaluation_mode_stand_below_the_table(tmp_path, capsys, is_frozen):
    """Their dropout is off and their batch norms don't move, which the table doesn't show."""

    def model():
        network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
        network[0].train(not is_frozen)
        return network

    with isolated_trainer(tmp_path, tiny_task(model=model), callbacks=[Summary()]) as trainer:
        trainer.fit()

    assert ("1 module stays in evaluation mode: 0;" in capsys.readouterr().out) == is_frozen
