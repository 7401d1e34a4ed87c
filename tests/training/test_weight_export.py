"""The file of exported weights: tensors come back, and a failure has no traceback of Rust."""

from __future__ import annotations

import errno
import os
import stat

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from eventloop.errors import EventloopError, NonFiniteError
from eventloop.training import weight_export
from eventloop.training.weight_export import save_tensors


def test_tensors_come_back(clean):
    """Views and tensors with gradients, too."""
    tensors = {"a": torch.ones(3, 2, requires_grad=True).T, "b": torch.zeros(())}

    path = save_tensors(tensors, clean / "new" / "model.safetensors")

    torch.testing.assert_close(load_file(path), {name: t.detach() for name, t in tensors.items()})


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")]
)
def test_a_full_disk_is_named_with_the_path(error, clean, monkeypatch):
    """Safetensors raises an error of its own for it."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(weight_export, "save_file", fail)

    with pytest.raises(
        EventloopError, match=r"written to .*m.safetensors'.*No space left[\s\S]*fix"
    ):
        save_tensors({}, clean / "m.safetensors")


def test_weights_can_not_be_exported_into_a_folder(make_trainer, clean):
    """A mistake of the caller's, not of the library that writes."""
    with pytest.raises(EventloopError, match=rf"can't be written to '{clean}': it is a folder"):
        make_trainer().export(clean)


def test_weights_that_are_not_finite_are_refused_or_warned_of(make_trainer, clean):
    """A file of NaN is found out when the model is in use."""
    path = clean / "model.safetensors"
    refusing, warning = make_trainer(), make_trainer(on_bad_loss="ignore")
    for trainer in (refusing, warning):
        with torch.no_grad():
            next(trainer.state.model.parameters()).fill_(torch.nan)

    with pytest.raises(NonFiniteError, match=r"aren't exported: '.*weight' isn't finite"):
        refusing.export(path)
    assert not path.exists()
    with pytest.warns(UserWarning, match=r"aren't finite: '.*weight' is the first"):
        warning.export(path)
    assert path.exists()


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


def test_what_is_no_tensor_is_not_exported_and_told(make_trainer, make_task, clean):
    """A file of safetensors has no room for it."""
    trainer = make_trainer(make_task(model=lambda: Extra(3, 3)))

    with pytest.warns(UserWarning, match="not exported, because they aren't tensors: _extra_state"):
        trainer.export(clean / "model.safetensors")

    assert load_file(clean / "model.safetensors").keys() == {"weight", "bias"}
    other = make_trainer(make_task(model=lambda: Extra(3, 3)))
    other.load_weights(clean / "model.safetensors")
    assert torch.equal(other.state.model.weight, trainer.state.model.weight)


def test_the_file_is_one_of_torch_with_the_mode_of_any_new_file(clean):
    """Transformers refuses a file without `format`; colleagues read what the umask lets them."""
    before = os.umask(0o002)
    try:
        path = save_tensors({"a": torch.ones(1)}, clean / "model.safetensors")
    finally:
        os.umask(before)

    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "model.onnx", "model.ckpt"])
def test_a_file_named_as_another_format_is_refused(name, make_trainer, clean):
    """Other programs read `model.pth` with torch.load, which can't read what would be in it."""
    trainer = make_trainer()

    with pytest.raises(EventloopError, match=r"write export\('model.safetensors'\)"):
        trainer.export(clean / name)

    assert not (clean / name).exists()
    assert trainer.export(clean / "model.safetensors").exists()
