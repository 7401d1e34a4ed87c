"""With an average of eventloop's, files, scores and validation after the fit are of the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_cases import CASES, Case, Net, fitted, loaders, told

from eventloop_ema import Ema
from eventloop_lightning import Trainer
from eventloop_swa import Swa

AVERAGES: dict[str, Callable[[], object]] = {
    "ema": lambda: Ema(decay=0.9),
    "swa": lambda: Swa(start="1ep", interval="2ba"),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("at_end", [False, True], ids=["after validation", "at the epoch's end"])
def test_a_file_has_the_weights_of_its_score(name, at_end, tmp_path):
    """Also where it is written when the averages aren't in the weights' place."""
    saves = ModelCheckpoint(
        tmp_path,
        monitor="val_loss",
        save_on_train_epoch_end=at_end,
        save_top_k=-1,
        filename="{epoch}",
    )
    more = {"enable_checkpointing": True, "max_epochs": 4}
    averages = [AVERAGES[name]()]
    module, trainer = fitted(Trainer, Case(Net), callbacks=[saves], algorithms=averages, **more)
    last = {key: one.cpu().clone() for key, one in module.state_dict().items()}

    for path, score in saves.best_k_models.items():
        (found,) = trainer.validate(module, loaders()[1], ckpt_path=path, verbose=False)
        assert found["val_loss"] == score.item()
    file = torch.load(tmp_path / "epoch=3.ckpt")
    trained = file["eventloop"]["parts"]["model"]
    assert all(torch.equal(file["state_dict"][key].cpu(), one) for key, one in last.items())
    assert not torch.equal(trained["net.0.weight"].cpu(), last["net.0.weight"])


@pytest.mark.parametrize("name", AVERAGES)
def test_validation_after_the_fit_is_that_of_its_end(name):
    """The module has the average then, as with Lightning's own callbacks."""
    module, trainer = fitted(Trainer, CASES["plain"], algorithms=[AVERAGES[name]()])
    score = trainer.callback_metrics["val_loss"].item()

    (found,) = trainer.validate(module, loaders()[1], verbose=False)

    assert found["val_loss"] == score
    is_same = torch.equal(trainer.averages["net.0.weight"].cpu(), module.net[0].weight.cpu())
    assert is_same == (name == "ema")  # swa adds to its mean after the last validation


@pytest.mark.parametrize("after", [False, True], ids=["in the fit", "after it"])
def test_a_run_goes_on_with_the_weights_that_were_trained(after, tmp_path):
    """Averages of averages would be another run."""
    saves = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    given = {"max_epochs": 2, "enable_checkpointing": True}
    _, trainer = fitted(
        Trainer, CASES["plain"], callbacks=[saves], algorithms=[Ema(decay=0.9)], **given
    )
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    expected = told(*fitted(Trainer, CASES["plain"], algorithms=[Ema(decay=0.9)], max_epochs=4))

    path = str(tmp_path / ("after.ckpt" if after else "step=6.ckpt"))
    resumed = fitted(
        Trainer, CASES["plain"], seed=5, max_epochs=4, algorithms=[Ema(decay=0.9)], ckpt_path=path
    )

    assert told(*resumed) == expected


def test_weights_alone_are_the_average(tmp_path):
    """A file for serving, say."""
    saves = ModelCheckpoint(tmp_path, filename="w", save_weights_only=True, every_n_train_steps=18)
    more = {"enable_checkpointing": True}
    module, _ = fitted(
        Trainer, CASES["plain"], callbacks=[saves], algorithms=[Ema(decay=0.9)], **more
    )

    file = torch.load(tmp_path / "w.ckpt")

    assert "eventloop" not in file
    assert torch.equal(file["state_dict"]["net.0.weight"].cpu(), module.net[0].weight.cpu())
