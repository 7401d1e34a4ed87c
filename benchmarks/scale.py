"""Scale: what ranks tell each other, counted for up to 1,024 of them, and what it would take.

    python benchmarks/scale.py [--ranks 8,64,1024] [--real 2,4,8] [--json]

The first part runs rank 0 alone, in a group of so many ranks that all do what it does: every collective
is counted, with the bytes that rank 0 sends and receives, and returns what such peers would make it
return. Loops: eventloop's, with DDP and with FSDP2, and plain ones of the same model. The second part
starts real processes under gloo on this machine and takes the time until the first batch, of a step, and
of the end. The third puts the counts into a model with the latencies and bandwidths that it states.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, Trainer, hookimpl
from eventloop.distributed import collectives
from eventloop.distributed.data_parallel import DataParallel
from eventloop_testing import run_ranks

NUM_STEPS = 160
BATCH = 4
PHASES = ("start", "step", "evaluation", "checkpoint", "end")
LOOPS = ("eventloop", "DDP", "eventloop-fsdp", "FSDP2")
# A host's message over TCP within a data centre; a device's over InfiniBand; bytes a second of each;
# what Python takes to unpickle a small object. Stated, not measured.
HOST_S, DEVICE_S = 50e-6, 10e-6
HOST_BYTES_PER_S, DEVICE_BYTES_PER_S = 1e9, 25e9
UNPICKLE_S = 5e-6

Counts = dict[str, dict[str, Any]]


class Peers(dist.ProcessGroup):
    """A group whose ranks all do what this one does: sums are multiples, gathered parts are alike."""

    log: list[tuple[str, str, str, int, int]] = []  # phase, group, kind, bytes sent, received
    phase = "start"

    def __init__(self, num_ranks: int, role: str) -> None:
        super().__init__(0, num_ranks)
        self._num_ranks = num_ranks
        self.role = role

    def size(self) -> int:
        return self._num_ranks

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "peers"

    @property
    def pg_name(self) -> str:
        """The name under which torch has registered it."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    group_name = pg_name

    def _note(self, kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        num_sent, num_received = (sum(one.nbytes for one in some) for some in (sent, received))
        phase = "checkpoint" if _is_called_by("checkpoint") else self.phase
        self.log.append((phase, self.role, kind, num_sent, num_received))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._note("all_reduce", tensors, tensors)
        if (opts or AllreduceOptions()).reduceOp == dist.ReduceOp.SUM:
            for one in tensors:
                one.mul_(self._num_ranks)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        self._note("all_gather", inputs, [one for some in outputs for one in some])
        for some, given in zip(outputs, inputs, strict=True):
            for one in some:
                one.copy_(given)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        self._note("all_gather", [given], [output])
        output.view(self._num_ranks, -1).copy_(given.reshape(1, -1).expand(self._num_ranks, -1))
        return _done(output)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        self._note("gather", inputs, [one for some in outputs for one in some])
        for some, given in zip(outputs, inputs, strict=True):
            for one in some:
                one.copy_(given)
        return _done(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._note("broadcast", tensors, [])
        return _done(tensors)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        self._note("reduce_scatter", [given], [output])
        output.copy_(given.reshape(self._num_ranks, -1)[0].reshape(output.shape))
        return _done(output)

    def barrier(self, opts: Any = None) -> Any:
        self._note("barrier", [], [])
        return _done(None)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    # As torch's own group of threads does, for tests; private (torch 2.13).
    return torch._C._distributed_c10d._create_work_from_future(future)


def join(num_ranks: int) -> None:
    """Makes this process rank 0 of so many, all alike."""
    roles = iter(("default", "host", "aside", "threads"))
    dist.Backend.register_backend(
        "peers",
        lambda store, rank, size, timeout: Peers(size, next(roles, "other")),
        devices=["cpu"],
    )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("peers", store=dist.HashStore(), rank=0, world_size=num_ranks)
    made = dist.new_group
    dist.new_group = lambda backend=None, **given: made(backend="peers", **given)
    DataParallel.watched = lambda self: contextlib.nullcontext()  # it has no other process to watch
    collectives._NOTICED_S *= num_ranks  # the seconds are rank 0's, and the sum has all ranks'


def _is_called_by(place: str) -> bool:
    """Whether this module of eventloop has asked: a save is agreed upon by later steps, too."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        if f"/eventloop/{place}" in frame.f_code.co_filename.replace(os.sep, "/"):
            return True
    return False


class Phases:
    """Says which part of a run the loop is in."""

    @hookimpl(tryfirst=True)
    def batch_start(self, state: Any) -> None:
        Peers.phase = "step"

    @hookimpl(wrapper=True)
    def evaluate(self, state: Any) -> Any:
        before, Peers.phase = Peers.phase, "evaluation"
        result = yield
        Peers.phase = before
        return result

    @hookimpl(tryfirst=True)
    def fit_end(self, state: Any) -> None:
        Peers.phase = "end"


class Blocks(nn.Sequential):
    """Four layers, each a part that FSDP2 shards by itself."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def data(num_ranks: int) -> TensorDataset:
    """Returns as many samples as the steps of so many ranks take."""
    num_samples = num_ranks * BATCH * NUM_STEPS
    return TensorDataset(torch.zeros(num_samples, 64), torch.zeros(num_samples, 64))


def task(num_ranks: int) -> Task:
    """Returns what is trained: the blocks on zeros, with an evaluation."""
    samples = data(num_ranks)
    return Task(
        model=Blocks(),
        train_dataloader=DataLoader(samples, batch_size=BATCH, shuffle=True),
        eval_dataloaders=DataLoader(samples, batch_size=BATCH),
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )


def ours(num_ranks: int, microbatches: int, algorithms: Sequence[object] = ()) -> None:
    """Trains with eventloop; a checkpoint at the start, in the middle and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            task(num_ranks),
            algorithms=[Phases(), *algorithms],
            max_duration=f"{NUM_STEPS}ba",
            checkpoint_interval=f"{NUM_STEPS // 2}ba",
            eval_interval=f"{NUM_STEPS // 2}ba",
            microbatch_size=BATCH // microbatches if microbatches > 1 else None,
            run_dir=folder + "/run",
            device="cpu",
            autoload=False,
        )
        trainer.fit()
        trainer.close()


def plain(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Trains with a loop of five lines."""
    model = wrap(Blocks())
    optimizer = torch.optim.AdamW(model.parameters())
    Peers.phase = "step"
    for _ in range(NUM_STEPS):
        nn.functional.mse_loss(model(torch.zeros(BATCH, 64)), torch.zeros(BATCH, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model: nn.Module) -> nn.Module:
    """Returns a model sharded by FSDP2, by block and as a whole."""
    from torch.distributed.fsdp import fully_shard

    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    return model


def count(loop: str, num_ranks: int, microbatches: int) -> Counts:
    """Returns what rank 0 of so many sends and receives in each phase of a loop, by kind."""
    join(num_ranks)
    if loop == "eventloop":
        ours(num_ranks, microbatches)
    elif loop == "eventloop-fsdp":
        from eventloop_fsdp import Fsdp

        ours(num_ranks, microbatches, [Fsdp()])
    else:
        plain(nn.parallel.DistributedDataParallel if loop == "DDP" else sharded)
    counts: Counts = {phase: {} for phase in PHASES}
    for phase, role, kind, sent, received in Peers.log:
        row = counts[phase].setdefault(f"{kind} {role}", [0, 0, 0])
        for idx, more in enumerate((1, sent, received)):
            row[idx] += more
    for row in counts["step"].values():
        row[:] = [one / NUM_STEPS for one in row]
    return counts


def counted(loop: str, num_ranks: int, microbatches: int) -> Counts:
    """Returns what `count` counts, in a process of its own: it can join one group alone."""
    given = [sys.executable, __file__, "--count", loop, "--ranks", str(num_ranks)]
    given += ["--microbatches", str(microbatches)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    counts: Counts = json.loads(done.stdout.splitlines()[-1])
    return counts


def seconds_of(kind: str, num_ranks: int, sent: float, received: float, num: float) -> float:
    """Returns the time of so many collectives in the model, one after the other.

    A reduction or a broadcast goes through a tree, what all gather through a ring, as gloo and NCCL
    do it, and what one rank gathers comes to it from all at once; it is unpickled for each rank.
    """
    name, role = kind.split()
    on_host = role in ("host", "threads")
    latency, per_s = (HOST_S, HOST_BYTES_PER_S) if on_host else (DEVICE_S, DEVICE_BYTES_PER_S)
    depth = math.log2(num_ranks)
    if name == "all_reduce":
        return num * 2 * depth * latency + 2 * sent / per_s
    if name == "broadcast":
        return num * depth * latency + sent / per_s
    num_messages = 1 if name == "gather" else num_ranks - 1
    sending = num * num_messages * latency + max(sent, received) / per_s
    return sending + (num * num_ranks * UNPICKLE_S if on_host else 0)


class Moments:
    """Takes the time of the first batch, of steps, and of the end."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.ended = 0.0

    @hookimpl
    def batch_start(self, state: Any) -> None:
        self.steps.append(time.perf_counter())

    @hookimpl(tryfirst=True)
    def fit_end(self, state: Any) -> None:
        self.ended = time.perf_counter()


def real(num_ranks: int) -> tuple[float, float, float]:
    """Returns milliseconds of real ranks on this machine: until the first batch, a step, the end."""
    torch.set_num_threads(1)
    began, moments = time.perf_counter(), Moments()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        trainer = Trainer(
            task(num_ranks),
            callbacks=[moments],
            max_duration=f"{NUM_STEPS}ba",
            run_dir=folder + "/run",
            device="cpu",
            autoload=False,
        )
        trainer.fit()
        trainer.close()
    ended = time.perf_counter()
    steps = [
        after - before for before, after in zip(moments.steps, moments.steps[1:], strict=False)
    ]
    parts = moments.steps[0] - began, statistics.median(steps), ended - moments.ended
    first, step, end = (1e3 * part for part in parts)
    return first, step, end


def _counts_table(found: dict[tuple[str, int], Counts], num_ranks: Sequence[int]) -> Table:
    table = Table("loop", "phase", "collective", *(f"{n:,} ranks" for n in num_ranks))
    for loop in dict.fromkeys(loop for loop, _ in found):
        for phase in PHASES:
            kinds = dict.fromkeys(kind for n in num_ranks for kind in found[loop, n][phase])
            for kind in kinds:
                cells = (found[loop, n][phase].get(kind) for n in num_ranks)
                texts = ("" if one is None else _cell(*one) for one in cells)
                table.add_row(loop, phase, kind, *texts)
    return table


def _cell(num: float, sent: float, received: float) -> str:
    return f"{num:.4g}: {_size(sent)} out, {_size(received)} in"


def _size(num_bytes: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def _model_table(found: dict[tuple[str, int], Counts], num_ranks: Sequence[int]) -> Table:
    table = Table("loop", "phase", *(f"{n:,} ranks" for n in num_ranks))
    for loop in dict.fromkeys(loop for loop, _ in found):
        for phase in PHASES:
            times = [_milliseconds(found[loop, n][phase], n) for n in num_ranks]
            if any(times):
                table.add_row(loop, phase, *(f"{one:.3g} ms" for one in times))
    return table


def _milliseconds(row: dict[str, Any], num_ranks: int) -> float:
    given = row.items()
    return 1e3 * sum(
        seconds_of(kind, num_ranks, sent, received, num) for kind, (num, sent, received) in given
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,64,1024", help="how many alike ranks")
    parser.add_argument("--real", default="2,4,8", help="how many real ones; '' for none")
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument(
        "--microbatches", type=int, default=1, help="of eventloop's batches: 1 to 4"
    )
    parser.add_argument("--count", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    num_ranks = [int(one) for one in given.ranks.split(",")]
    if given.count:
        with contextlib.redirect_stderr(io.StringIO()):
            counts = count(given.count, *num_ranks, given.microbatches)
        print(json.dumps(counts))
        return
    console = Console()
    loops = given.loops.split(",")
    found = {(loop, n): counted(loop, n, given.microbatches) for loop in loops for n in num_ranks}
    console.print("Collectives of rank 0, a step's as a mean:", _counts_table(found, num_ranks))
    console.print("In the model:", _model_table(found, num_ranks))
    for n in filter(None, given.real.split(",")):
        first, step, end = (
            statistics.median(part)
            for part in zip(*run_ranks(real, int(n), world_size=int(n)), strict=True)
        )
        console.print(
            f"{n} processes: first batch {first:.0f} ms, a step {step:.1f} ms, end {end:.0f} ms"
        )


if __name__ == "__main__":
    main()
