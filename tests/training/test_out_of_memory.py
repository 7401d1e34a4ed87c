"""Out of memory: the error says which setting has the batch fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop.errors import notes_of
from eventloop.training.out_of_memory import is_out_of_memory

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
MPS = RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")


class Fails(nn.Module):
    """Raises an error in its forward pass, in training, in evaluation or in both."""

    def __init__(self, error, modes=(True, False)):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.error, self.modes = error, modes

    def forward(self, inputs):
        if self.training in self.modes:
            raise type(self.error)(*self.error.args)
        return self.layer(inputs)


def note_of(error):
    """Returns the note about memory; there may be one at most."""
    notes = notes_of(error, "memory")
    assert len(notes) < 2
    return notes[0] if notes else ""


@pytest.mark.parametrize("error", [CUDA, MPS], ids=["CUDA", "MPS"])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_training_pass_names_auto_microbatches(error, microbatch_size, make_trainer, make_task):
    """It is one argument; torch's message proposes environment variables."""
    trainer = make_trainer(make_task(model=Fails(error)), microbatch_size=microbatch_size)

    with pytest.raises(RuntimeError) as caught:
        trainer.fit()

    note = note_of(caught.value)
    size = microbatch_size or 4
    assert f"batch of (float32 ({size}, 3), int64 ({size},)) in training" in note
    assert note.endswith('`microbatch_size="auto"`')


def test_a_backward_pass_does_too(make_trainer, make_task):
    """Most memory is taken there; no owner of an action is under way."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError(*CUDA.args)

    task = make_task(loss=lambda outputs, targets: Backward.apply(outputs.mean()))

    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(task).fit()

    assert '`microbatch_size="auto"`' in note_of(caught.value)


def test_a_microbatch_of_one_sample_is_not_told_to_be_smaller(make_trainer, make_task):
    """What is set already is no advice."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(make_task(model=Fails(CUDA)), microbatch_size="auto").fit()

    assert "auto" not in note_of(caught.value)


def test_a_batch_that_the_core_does_not_split_needs_a_smaller_loader(make_trainer, make_task):
    """With `loss_splits=False` every microbatch size is refused."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(make_task(model=Fails(CUDA), loss_splits=False)).fit()

    assert "smaller batch_size" in note_of(caught.value)
    assert "auto" not in note_of(caught.value)


@pytest.mark.parametrize("where", ["fit", "eval", "sanity_eval", "predict"])
def test_an_evaluation_names_its_data_loader(where, make_trainer, make_task, make_batches):
    """Microbatches are of training alone; the batch size of an eval set is the loader's."""
    task = make_task(model=Fails(CUDA, [False]), eval_dataloaders={"valid": make_batches()})
    trainer = make_trainer(task)
    arguments = [make_batches()] if where == "predict" else []

    with pytest.raises(torch.OutOfMemoryError) as caught:
        getattr(trainer, where)(*arguments)

    loader = "data loader to predict for" if where == "predict" else "eval data loader 'valid'"
    assert f"give the {loader} a smaller batch_size" in note_of(caught.value)
    assert "auto" not in note_of(caught.value)


def test_neither_a_step_nor_another_error_has_a_note(make_trainer, make_task, make_plugin):
    """Smaller microbatches wouldn't help either of them."""

    def allocate(state):
        raise torch.OutOfMemoryError(*CUDA.args)

    stepping = make_trainer(algorithms=[make_plugin(after_train_batch=allocate)])
    failing = make_trainer(make_task(model=Fails(RuntimeError("mat1 and mat2"))))

    for trainer in (stepping, failing):
        with pytest.raises(RuntimeError) as caught:
            trainer.fit()
        assert not note_of(caught.value)


def test_errors_of_allocators_are_recognised():
    """Not all of them are an OutOfMemoryError: cuBLAS, and the host, raise plain errors."""
    host = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 4 TB")
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    assert all(map(is_out_of_memory, [CUDA, MPS, host, cublas]))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
