"""The plugin: refusals, draws, gradients that are sums as yet, and models of transformers."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from tp_cases import CHARLM, LAYOUTS, SEQUENCE, make_task, train

from eventloop import EventloopError, Task, hookimpl
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_tp import Tp
from eventloop_tp.plans import resolved
from eventloop_tp.styles import add_up_gradients, divide, draw_apart


def refused(folder, options, task=None, **settings):
    """Returns the message of what is raised before the first step."""
    try:
        with isolated_trainer(folder, task or make_task(), algorithms=[Tp(**options)], **settings):
            return ""
    except EventloopError as error:
        return str(error)


def plain():
    return make_task(lambda: nn.Sequential(nn.Embedding(128, 4), nn.Linear(4, 128)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "task", "settings", "words"),
    [
        ({"size": 3}, None, {}, "can't be divided by 3, for 'tp'"),
        ({"size": 2}, plain, {}, "plan is not set, and Sequential has no tp_plan"),
        ({"size": 2}, None, {"microbatch_size": "auto"}, "microbatch_size='auto' isn't possible with tp"),
        ({"size": 2}, None, {"compile": {"backend": "eager"}}, "compile isn't possible with tp"),
        ({"size": 2, "sequence": True}, None, {}, "sequence: the plan leaves out characters"),
        ({"size": 2, "loss_parallel": True}, None, {}, "no layer that is colwise_gather_output"),
        ({"size": 2}, lambda: make_task(optimizer=lambda model: torch.optim.LBFGS(model.parameters())),
         {}, "is LBFGS, which can't step the shards of tp"),
    ],
)  # fmt: skip
def test_what_tp_can_not_do_is_refused_by_name(tmp_path, options, task, settings, words):
    """Before the first step, on every rank."""
    made = None if task is None else task()

    for message in run_ranks(refused, tmp_path, options, made, **settings):
        assert words in message


def test_one_process_and_a_size_of_one_have_nothing_to_divide(tmp_path):
    """Who asks for it is told why it takes no part."""
    assert "one process alone has no rank to share layers" in refused(tmp_path, {"size": 2})
    for message in run_ranks(refused, tmp_path, {}):
        assert "tp.size is 1; `Tp(size=2)` divides each layer over two ranks" in message


def lengths(folder):
    texts = torch.randint(128, (12, 8), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(texts[:, :-1], texts[:, 1:])
    task = Task(
        model=lambda: CHARLM["GPT"](64, 1, 2),
        loss=CHARLM["next_character_loss"],
        train_dataloader=lambda: DataLoader(data, 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    plugin = Tp(size=2, plan=SEQUENCE, sequence=True)
    try:
        with isolated_trainer(folder, task, algorithms=[plugin]) as trainer:
            trainer.fit()
    except EventloopError as error:
        return str(error)


def test_sequences_that_can_not_be_divided_are_refused(tmp_path):
    """Ranks would wait for tokens that aren't there."""
    for message in run_ranks(lengths, tmp_path):
        assert "(4, 7) can't be divided along dimension 1 over 2 ranks" in message


def draws():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    apart, alike = nn.Dropout(0.5), nn.Dropout(0.5)
    draw_apart(apart, dist.get_rank())
    inputs = torch.ones(64)
    return apart(inputs), alike(inputs), apart.eval()(inputs)


def test_dropout_of_divided_layers_draws_apart_and_others_alike():
    """One mask for all ranks would tie heads together; two masks of one tensor would tear it apart."""
    (one, whole, seen), (other, same, _) = run_ranks(draws)

    assert not torch.equal(one, other)
    assert torch.equal(whole, same)
    assert torch.equal(seen, torch.ones(64))


class Normed(nn.Module):
    """Norms inside of divided layers, as those of queries and keys are; and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.full((8,), 0.1))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs_BC):
        heads_BHC = self.up(inputs_BC + self.shift).unflatten(-1, (-1, 4))
        return self.head(self.down(self.norm(heads_BHC).flatten(1)))


def of_sums(model, inputs):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"up": "colwise", "down": "rowwise", "norm": "replicated_summed"}
    model.head.bias.requires_grad = False
    divide(model, resolved(model, plan, 2), mesh)
    model(inputs).square().mean().backward()
    add_up_gradients([*model.parameters()])
    assert model.head.bias.grad is None
    assert all(not one.is_leaf or isinstance(one, nn.Parameter) for one in model.parameters())
    return {
        name: one.grad.full_tensor()
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def test_gradients_that_are_sums_over_ranks_are_added_up():
    """Each rank has those of its own heads alone."""
    torch.manual_seed(0)
    model, inputs = Normed(), torch.randn(6, 8)
    alone = copy.deepcopy(model)
    alone(inputs).square().mean().backward()

    for grads in run_ranks(of_sums, model, inputs):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, alone.get_parameter(name).grad)


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)  # fmt: skip
    return LlamaForCausalLM(config).double()


def fit_llama(folder, options=None, tied=False):
    tokens = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": one, "labels": one} for one in tokens]
    task = Task(
        model=lambda: llama(tied),
        train_dataloader=lambda: DataLoader(rows, 4),
        eval_dataloaders=lambda: DataLoader(rows, 4),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    plugins = [] if options is None else [Tp(**options)]
    with isolated_trainer(folder, task, algorithms=plugins, clip_norm=0.5) as trainer:
        trainer.fit()
        found = trainer.state.model.state_dict()
        notes = trainer.notes
        whole = {
            name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in found.items()
        }
        return whole, dict(trainer.state.eval_metrics), notes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss_parallel", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_llama_is_divided_by_its_own_plan(tmp_path, tied, loss_parallel):
    """Two key-value heads on two ranks, the vocabulary divided, tied weights tied."""
    pytest.importorskip("transformers")
    expected, metrics, _ = fit_llama(tmp_path / "one", tied=tied)

    options = {"size": 2, "loss_parallel": loss_parallel}
    (actual, found, notes), _ = run_ranks(fit_llama, tmp_path / "two", options, tied)

    assert any("16 layers divided over 2 ranks" in one for one in notes)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)
    for name, value in metrics.items():
        torch.testing.assert_close(found[name], value)


def test_sequences_of_a_llama_are_refused(tmp_path):
    """Its attention takes the length from inputs that would be divided."""
    task = Task(model=llama, train_dataloader=lambda: DataLoader([{}], 1))

    for message in run_ranks(refused, tmp_path, {"size": 2, "sequence": True}, task):
        assert "sequence isn't possible with LlamaForCausalLM" in message


def broken(folder, sharded):
    """Changes one weight on one rank: of a shard that two ranks hold, or of what all hold."""

    class Breaks:
        @hookimpl
        def fit_end(self, state):
            if os.environ["RANK"] == "3":
                name = "head.weight" if not sharded else "blocks.0.mlp.1.weight"
                bits = state.model.get_parameter(name).to_local().detach().view(torch.int64)
                bits.view(-1)[5] ^= 1 << 51

    try:
        train(folder, (*LAYOUTS["tp 2 x dp 2"], Breaks))
    except EventloopError as error:
        return str(error)


@pytest.mark.nightly
@pytest.mark.parametrize("sharded", [False, True])
def test_one_flipped_bit_of_a_weight_is_found(tmp_path, sharded):
    """In what all ranks hold, and in a shard that two of four hold."""
    name = "blocks.0.mlp.1.weight" if sharded else "head.weight"

    for message in run_ranks(broken, tmp_path, sharded, world_size=4):
        assert f"have drifted apart: '{name}' differs" in message
        assert "3 (data 1, tp 1)" in message
