"""A stream that goes on with other ranks in mid-epoch: 2, then 1, then 4, and each sample once.

Trains an epoch of mosaicml-streaming on a global batch of 8 (or of the streams of `eventloop-streaming`), kills
the run twice, and counts the samples.

    python benchmarks/stream_ranks.py [--own]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eventloop import Task, hookimpl
from eventloop_testing import isolated_trainer, run_ranks

NUM, GLOBAL_BATCH = 96, 8


class Stopped(BaseException):
    """The run ends here, as if it were killed."""


def of_mosaicml(folder: Path, batch_size: int) -> Any:
    import streaming

    data = streaming.StreamingDataset(
        local=str(folder), shuffle=True, shuffle_seed=0, batch_size=batch_size,
        num_canonical_nodes=1,
    )  # fmt: skip
    loader = streaming.StreamingDataLoader(data, batch_size=batch_size)
    loader.suits_any_ranks = True
    return loader


def own(folder: Path, batch_size: int) -> Any:
    from eventloop_streaming import Batches, Shuffled, Sliced

    return Batches(Sliced(Shuffled(range(NUM), 16)), batch_size)


def fit(folder: Path, make: Any, data: Path, stop: int | None) -> list[int]:
    """Returns the samples that this rank trained on."""
    seen: list[int] = []
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    size = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))

    class Sees:
        name = "sees"

        @hookimpl
        def batch_start(self, state: Any) -> None:
            if state.clock.batch == stop:
                raise Stopped

        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            batch = state.batch
            seen.extend(
                (batch["number"] if isinstance(batch, Mapping) else batch).flatten().tolist()
            )

    def forward(model: Any, batch: Any) -> Any:
        number = batch["number"] if isinstance(batch, Mapping) else batch
        return {"loss": model(number.float().view(-1, 1)).mean()}

    task = Task(
        model=lambda: nn.Linear(1, 1),
        train_dataloader=lambda: make(data, size),
        forward=forward,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
    )
    given = {"max_duration": "1ep", "checkpoint_interval": "1ba"}
    try:
        with isolated_trainer(folder, task, callbacks=[Sees()], **given) as trainer:
            trainer.fit()
    except Stopped:
        pass
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--own", action="store_true", help="the streams of eventloop-streaming")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name) / "runs", Path(name) / "data"
        make = own if given.own else of_mosaicml
        if not given.own:
            from stream_kinds import without_torchvision

            without_torchvision()
            import streaming

            columns = {"number": "int"}
            with streaming.MDSWriter(out=str(data), columns=columns, size_limit=200) as writer:
                for idx in range(NUM):
                    writer.write({"number": idx})
        counts: Counter[int] = Counter()
        for world_size, stop in ((2, 4), (1, 7), (4, None)):
            ranks = run_ranks(fit, folder, make, data, stop, world_size=world_size)
            print(f"{world_size} ranks trained on {sum(map(len, ranks))} samples")
            counts.update(one for rank in ranks for one in rank)
        lost = NUM - len(counts)
        print(f"lost {lost}, repeated {sum(counts.values()) - len(counts)} of {NUM}")


if __name__ == "__main__":
    main()
