"""The pretend accelerator: what trains on it, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from eventloop_testing import (
    MixedDevicesError,
    PretendError,
    counted_waits,
    pretend_device,
    shuffled_batches,
)
from eventloop_testing import tiny_task as make_tiny_task

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
}


def train(device, make_optimizer, steps=20):
    """Trains in a plain loop; returns the weights on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.to(device)
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(4, 3, generator=generator)
        loss = cross_entropy(model(inputs.to(device)), inputs.argmax(1).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.about_cpu
def test_torch_sees_it_while_it_is_switched_on():
    """What follows in the process must find the devices that the machine has."""
    with pretend_device() as device:
        on = torch.accelerator.current_accelerator(), torch.accelerator.is_available()

    assert on == (torch.device("pretend"), True)
    assert device == torch.device("pretend:0")
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() != torch.device("pretend")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_ends_with_the_hosts_bits(optimizer, pretend_device):
    """It computes with the host's kernels, so that any difference is the loop's."""
    make = OPTIMIZERS[optimizer]

    torch.testing.assert_close(train(pretend_device, make), train("cpu", make), rtol=0, atol=0)


GIVEN = [{}, {"microbatch_size": 2, "clip_norm": 1.0}, {"microbatch_size": "auto"}]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_trainer_ends_with_the_hosts_bits(given, make_trainer, pretend_device):
    """With data on another device than the loss, nothing may be left behind on either."""

    def weights(device):
        task = make_tiny_task(train_dataloader=shuffled_batches())
        trainer = make_trainer(task, device=device, max_duration="2ep", **given)
        trainer.fit()
        return {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}

    torch.testing.assert_close(weights("pretend"), weights("cpu"), rtol=0, atol=0)


MIXED = {
    "operator": lambda device: torch.ones(2, device=device) + torch.ones(2),
    "host first": lambda device: torch.ones(2) * torch.ones(2, device=device),
    "index": lambda device: torch.ones(2)[torch.tensor([0], device=device)],
    "list": lambda device: torch.cat([torch.ones(2, device=device), torch.ones(2)]),
    "out": lambda device: torch.add(torch.ones(2), 1, out=torch.ones(2, device=device)),
    "generator": lambda device: torch.randn(2, device=device, generator=torch.Generator()),
    "number": lambda device: torch.equal(torch.ones((), device=device), torch.tensor(1.0)),
    "number written": lambda device: torch.tensor(1.0).add_(torch.ones((), device=device)),
    "data": lambda device: setattr(torch.ones(2, device=device), "data", torch.ones(2)),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_host_and_device_do_not_mix(mix, pretend_device):
    """A GPU refuses most of it, and copies the rest, which waits."""
    with pytest.raises(MixedDevicesError):
        mix(pretend_device)


def test_it_refuses_numpy_as_a_gpu_does(pretend_device):
    """The message is torch's own."""
    with pytest.raises(TypeError, match=r"can't convert pretend:0 device type tensor to numpy"):
        torch.ones(2, device=pretend_device).numpy()


def test_a_process_has_one(pretend_device):
    """Torch's guard for devices in Python knows no second one."""
    assert torch.accelerator.device_count() == 1
    with pytest.raises(PretendError, match="there is no device pretend:1"):
        torch.accelerator.set_device_index(1)
    with pytest.raises(PretendError, match="there is no device pretend:1"):
        torch.empty(1, device="pretend:1")


def test_two_ranks_train_on_one_each(make_trainer, two_ranks, pretend_device):
    """Gradients are exchanged, by DDP, too; the weights are those of two ranks on the CPU."""

    def weights(device):
        trainer = make_trainer(device=device, max_duration="2ep")
        trainer.fit()
        assert trainer.state.device.index == (trainer.state.rank if device == "pretend" else None)
        return {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}

    one, other = two_ranks(weights, "pretend")
    expected, _ = two_ranks(weights, "cpu")

    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one, expected, rtol=0, atol=0)


def test_a_module_keeps_its_parameters(pretend_device):
    """Tied weights stay tied, and what holds a parameter holds the one that is trained."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = weight = model[0].weight

    model.to(pretend_device)

    assert model[0].weight is model[1].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.device == pretend_device


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_one_of_its_own(copied, pretend_device):
    """Averages of weights are copies of the model, to be trained no further."""
    model = nn.Linear(2, 2).to(pretend_device)

    other = copied(model)
    with torch.no_grad():
        model.weight.zero_()

    assert isinstance(other.weight, nn.Parameter)
    assert other.weight.device == pretend_device
    assert other.weight.abs().sum() > 0


def test_a_view_shares_memory_and_history(pretend_device):
    """Writing into a view is writing into what it is a view of."""
    x = torch.arange(6.0, device=pretend_device).requires_grad_()
    y = x * 1

    y.view(2, 3)[0] = 5
    y.sum().backward()

    assert y.tolist() == [5, 5, 5, 3, 4, 5]
    assert x.grad.tolist() == [0, 0, 0, 1, 1, 1]


RESHAPED = {
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(5),
    "t_": lambda x: x.t_(),
    "data": lambda x: setattr(x, "data", torch.ones(7, device=x.device)),
}


@pytest.mark.parametrize("reshape", RESHAPED.values(), ids=RESHAPED)
def test_a_shape_changes_in_place(reshape, pretend_device):
    """The wrapper's shape is what autograd and `len` see."""
    x = torch.ones(3, 1, device=pretend_device)

    reshape(x)

    assert x.shape == x.raw.shape
    assert x.cpu().shape == x.shape


@pytest.mark.nightly
def test_memory_is_counted_by_allocation(pretend_device):
    """A view holds the memory of all of it."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, device=pretend_device)
    view = x[:5]

    del x
    assert torch.accelerator.memory_allocated() - before == 4000
    del view
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + 4000


def test_memory_has_a_limit():
    """Auto microbatches and authors of large models need the error that a GPU raises."""
    with pretend_device(limit_bytes=10**6) as device:
        torch.empty(1000, device=device)
        with pytest.raises(torch.OutOfMemoryError, match="PRETEND out of memory"):
            torch.empty(10**6, device=device)


@pytest.mark.parametrize("least", [30_000, 32_500, 35_000, 37_500, 40_000])
def test_memory_that_ends_amid_a_backward_pass_is_an_error_at_its_end(least):
    """Raised by an operator it would be lost in the engine; wherever it is, it is the same error."""
    with pretend_device() as device:
        weight = torch.ones(64, 64, device=device, requires_grad=True)
        loss = ((weight @ weight).relu() @ weight).sum()
        held = torch.accelerator.memory_allocated()

        with pretend_device(limit_bytes=held + least), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        assert (weight @ weight).sum().item() == 64**3


class MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.ones(2)


def test_a_number_of_the_host_takes_part_where_a_gpu_lets_it(pretend_device):
    """It is an argument of the kernel, for which the host waits for nothing."""
    with counted_waits() as waits:
        made = torch.ones(2, device=pretend_device) * torch.tensor(3.0)
        made.add_(torch.tensor(1))

    assert waits == []
    assert made.tolist() == [4, 4]


def test_devices_that_mix_amid_a_backward_pass_are_an_error_at_its_end(pretend_device):
    """The same for what a function of its author does."""
    weight = torch.ones(2, 2, device=pretend_device, requires_grad=True)

    with pytest.raises(MixedDevicesError):
        (MixesBackward.apply(weight @ weight) @ weight).sum().backward()


def embed_sparsely(device):
    layer = nn.Embedding(4, 2, sparse=True).to(device)
    layer(torch.tensor([0, 1], device=device)).sum().backward()


SPARSE = {
    "moved": lambda device: torch.eye(3).to_sparse().to(device),
    "made": lambda device: torch.eye(3, device=device).to_sparse(),
    "a gradient": embed_sparsely,
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_a_sparse_tensor_is_an_error(make, pretend_device):
    """Amid a backward pass, too, which torch would end with the process."""
    with pytest.raises(PretendError, match=r"has no tensors of layout torch\.sparse_coo"):
        make(pretend_device)

    assert torch.ones(2, device=pretend_device).sum().item() == 2


def test_it_draws_from_generators_of_its_own(pretend_device):
    """The host's numbers stay as they would be without it."""
    torch.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.randn(4, device=pretend_device), torch.rand_like(torch.ones(4, device="pretend"))
    torch.manual_seed(3)
    again = torch.randn(4, device=pretend_device), torch.rand_like(torch.ones(4, device="pretend"))

    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_a_generator_of_the_device_goes_on_where_it_was(pretend_device):
    """Its state is what a checkpoint has."""
    generator = torch.Generator(device=pretend_device).manual_seed(5)
    state = generator.get_state()
    first = torch.randperm(9, device=pretend_device, generator=generator)
    generator.set_state(state)

    assert generator.device == pretend_device
    assert torch.equal(first, torch.randperm(9, device=pretend_device, generator=generator))
    assert torch.Generator().device == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_goes_by_the_rules_of_gpus(dtype, pretend_device):
    """Products in the narrow type; norms, softmax and losses in float32; sums of both in float32."""
    linear, norm = nn.Linear(3, 3).to(pretend_device), nn.LayerNorm(3).to(pretend_device)
    x = torch.ones(4, 3, device=pretend_device)

    with torch.autocast("pretend", dtype=dtype):
        product = linear(x)
        types = [one.dtype for one in (product, norm(product), product.softmax(1), product + x)]
        loss = cross_entropy(product, torch.zeros(4, dtype=torch.long, device=pretend_device))
    loss.backward()

    assert types == [dtype, torch.float32, torch.float32, torch.float32]
    assert loss.dtype == linear.weight.grad.dtype == torch.float32


def test_a_scaler_skips_what_overflows(pretend_device):
    """GradScaler reads whether it did: once, in the step."""
    scaler = torch.amp.GradScaler("pretend")
    weight = torch.ones(2, device=pretend_device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 2**15


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_trainer_trains_in(precision, make_trainer, pretend_device):
    """Autocast and the scaler, together in a run."""
    trainer = make_trainer(device="pretend", precision=precision)

    trainer.fit()

    assert trainer.state.clock.batch == 3


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_have_the_bits_of_the_host(kind, is_packed):
    """A GPU has one kernel for all steps and layers; here it is the host's operator and its derivative."""

    def trained(device):
        torch.manual_seed(0)
        model = kind(3, 4, num_layers=2, dropout=0.5).to(device)
        inputs = torch.randn(5, 2, 3).to(device)
        given = pack_padded_sequence(inputs, torch.tensor([5, 3])) if is_packed else inputs
        outputs = model(given)[0]
        (outputs.data if is_packed else outputs).square().sum().backward()
        return [param.grad.cpu() for param in model.parameters()]

    with pretend_device(draws_from_host=True) as device:
        there = trained(device)

    assert all(map(torch.equal, there, trained("cpu")))


def test_a_layer_that_runs_twice_draws_the_same_twice(pretend_device):
    """What activation checkpointing repeats has the gradients of the pass that it stands for."""
    inputs = torch.ones(64, device=pretend_device, requires_grad=True)

    outputs = checkpoint(lambda x: dropout(x) * x, inputs, use_reentrant=False)
    outputs.sum().backward()

    torch.testing.assert_close(inputs.grad, 2 * outputs.detach())


KERNELS = {
    "silu": nn.functional.silu,
    "mish": nn.functional.mish,
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "masked attention": lambda x: nn.functional.scaled_dot_product_attention(
        x, x * 2, x, torch.ones(33, 33, dtype=torch.bool, device=x.device).tril()
    ),
}


@pytest.mark.parametrize("compute", KERNELS.values(), ids=KERNELS)
def test_what_has_a_kernel_of_its_own_has_the_bits_of_the_host(compute):
    """Of several, which torch makes of it for a device that it doesn't know, the last bits are others."""

    def computed(device):
        torch.manual_seed(0)
        inputs = torch.randn(2, 4, 33, 8).to(device).requires_grad_()
        outputs = compute(inputs)
        outputs.square().sum().backward()
        return outputs.detach().cpu(), inputs.grad.cpu()

    with pretend_device(draws_from_host=True) as device:
        there = computed(device)

    assert all(map(torch.equal, there, computed("cpu")))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_of_recurrent_networks_have_the_bits_of_the_host(kind, pretend_device):
    """They are called step by step."""
    model, inputs = kind(3, 4), torch.randn(2, 3)
    there = copy.deepcopy(model).to(pretend_device)

    for one, given in ((model, inputs), (there, inputs.to(pretend_device))):
        outputs = one(given)
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum().backward()

    pairs = zip(model.parameters(), there.parameters(), strict=True)
    assert all(torch.equal(param.grad, other.grad.cpu()) for param, other in pairs)


def test_a_recurrent_network_computes_in_what_autocast_says(pretend_device):
    """As it does on a GPU, with its hidden state."""
    model = nn.GRU(3, 4).to(pretend_device)

    with torch.autocast("pretend", dtype=torch.bfloat16):
        outputs, hidden = model(torch.randn(5, 2, 3, device=pretend_device))

    assert outputs.dtype == hidden.dtype == torch.bfloat16


def test_a_recurrent_network_takes_part_in_evaluation(pretend_device):
    """Without a graph."""
    model = nn.LSTM(3, 4).to(pretend_device)

    with torch.inference_mode():
        outputs, _ = model(torch.randn(5, 2, 3, device=pretend_device))

    assert outputs.device.type == "pretend"


def test_a_file_is_loaded_where_it_is_asked_for(tmp_path, pretend_device):
    """Saved on either device, and read in torch's safe mode."""
    saved = {"there": torch.ones(2, device=pretend_device), "here": [torch.ones(2)]}
    torch.save(saved, tmp_path / "file.pt")

    there = torch.load(tmp_path / "file.pt", map_location=pretend_device)
    here = torch.load(tmp_path / "file.pt", map_location="cpu")
    as_saved = torch.load(tmp_path / "file.pt")

    kinds = [
        (one["there"].device.type, one["here"][0].device.type) for one in (there, here, as_saved)
    ]
    assert kinds == [("pretend", "pretend"), ("cpu", "cpu"), ("pretend", "cpu")]
    torch.testing.assert_close(here["there"], there["there"].cpu())


def test_the_data_of_a_parameter_of_the_host_may_be_on_the_device(pretend_device):
    """It moves there, and stays the same parameter: FSDP moves weights so."""
    model = torch.nn.Linear(2, 2)
    weight = model.weight

    weight.data = weight.to(pretend_device)

    assert model.weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.device == pretend_device
    assert weight.requires_grad


def test_what_was_expanded_can_not_be_pinned(pretend_device):
    """As on a GPU: pinned memory has the strides of the tensor, and its entries would share it."""
    entries = torch.tensor([3.0])

    with pytest.raises(RuntimeError, match="single memory location"):
        entries.expand(4).pin_memory()
    assert entries.expand(4).contiguous().pin_memory().is_pinned()
