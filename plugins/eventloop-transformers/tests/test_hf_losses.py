"""`eventloop check-loss` of trainers: whether gradient accumulation is a batch in one piece."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from hf_cases import USE_CPU, gpt2, process_environment, rows

from eventloop_check.check_loss import run
from eventloop_check.check_loss.loss_check import check
from eventloop_check.check_loss.measurement import Measurement
from eventloop_check.check_loss.probe import CheckLoss
from eventloop_testing import isolated_trainer
from eventloop_transformers import loss_task


class Ignores(transformers.Trainer):
    """Leaves the number of items out, and transformers divides by nothing either."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class MeanOverMeans(Ignores):
    """Says so, and is divided by the number of microbatches."""

    loss_is_scaled_for_ga = False


class Sums(transformers.Trainer):
    """Divides a sum of its own by the number of items."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return loss / num_items_in_batch


class Prefers(transformers.Trainer):
    """Has the chosen rows in the first half of a batch, and the rejected ones in the second."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(input_ids=inputs["input_ids"]).logits[:, -1, 0]
        chosen, rejected = scores.chunk(2)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def task(kind=transformers.Trainer, **more):
    args = transformers.TrainingArguments("out", use_cpu=USE_CPU, report_to="none", **more)
    trainer = kind(model=gpt2(), args=args, train_dataset=rows(8))
    return loss_task(trainer, batch_size=8, pairs=kind is Prefers)


def causes(folder, kind, **more):
    """Returns what is found of microbatches and padding, in this process."""

    def measure(variants):
        found = {}
        for one in variants:
            if one.num_ranks > 1:
                found[one.name] = "it is for processes of its own"
                continue
            torch.manual_seed(0)
            settings = {
                "microbatch_size": one.microbatch_size,
                "eval_interval": None,
                "device": "cpu",
            }
            probe = CheckLoss(variant=one.name, folder=folder)
            place = folder / "runs" / one.name
            with isolated_trainer(
                place, task(kind, **more), algorithms=[probe], max_duration="1ba", **settings
            ) as trainer:
                trainer.fit()
            content = json.loads((folder / f"{one.name}.json").read_text())
            found[one.name] = Measurement.from_json(content)
        return found

    rows = check(measure, {}).rows
    return {row.variant.name: row.cause.kind for row in rows if row.cause is not None}


@pytest.mark.parametrize("kind", [transformers.Trainer, Sums])
def test_trainers_that_count_their_tokens_hold(tmp_path, kind):
    """Each part is divided by the items of the whole batch."""
    assert causes(tmp_path, kind) == {}


def test_a_trainer_that_ignores_the_number_of_items_is_found(tmp_path):
    """Its gradients are as many times too large as there are microbatches."""
    found = causes(tmp_path, Ignores)

    assert {found[name] for name in ("microbatch-1", "microbatch-3")} == {"undivided"}


def test_a_mean_over_means_is_found(tmp_path):
    """Microbatches of few tokens count as much as those of many."""
    found = causes(tmp_path, MeanOverMeans)

    assert found["microbatch-1"] == "tokens"


def test_the_two_rows_of_a_sample_stay_together(tmp_path):
    """A mean over pairs: only microbatches of other numbers of them differ, by their weights."""
    assert causes(tmp_path, Prefers) == {"microbatch-3": "samples"}


TASK = """
from test_hf_losses import Ignores, task as made

def task():
    return made({kind})
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "expected"), [("", {}), ("Ignores", {"undivided", "tokens"})])
def test_the_command_checks_two_ranks_too(tmp_path, monkeypatch, capsys, kind, expected):
    """Tokens are counted over both, as the trainer counts them."""
    for name, value in process_environment(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "checked_task.py").write_text(TASK.format(kind=kind))

    status = run(["checked_task.py", "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert status == bool(expected)
    assert {row["cause"]["kind"] for row in rows if row.get("cause")} == set(expected)
    ranks = next(row for row in rows if row["name"] == "ranks")
    assert ranks["result"] == ("differs" if expected else "holds")
