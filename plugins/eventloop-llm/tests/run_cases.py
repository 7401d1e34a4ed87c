"""Runs that several test files make: those that end early, and those of TRL."""

from __future__ import annotations

from typing import Any

from sft_cases import weights

from eventloop import hookimpl


class Ends:
    """Ends a run before a batch, on all ranks.

    Args:
        batch: None for a run that goes to its end.
    """

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch

    @hookimpl
    def batch_start(self, state: Any) -> None:
        """Ends the run."""
        if state.clock.batch == self.batch:
            raise EOFError


def trained_by_trl(
    trainer_type: Any, config_type: Any, rows: Any, model: Any, tokenizer: Any, *, ref_model: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Trains with a trainer of TRL, on rows in their order; returns the weights, and the loss of each step."""
    import datasets

    settings = {
        "per_device_train_batch_size": 6, "num_train_epochs": 2, "learning_rate": 0.1,
        "lr_scheduler_type": "cosine", "max_length": 48, "logging_steps": 1, "optim": "sgd",
        "train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    reference = {} if ref_model is None else {"ref_model": ref_model}
    trainer = trainer_type(
        model=model, args=config_type("out", **settings | options), processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows), **reference,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return weights(trainer.accelerator.unwrap_model(trainer.model)), losses
