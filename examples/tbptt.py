"""Truncated backpropagation: a recurrent network follows long waves, a piece at a time.

eventloop fit examples/tbptt.py
eventloop fit examples/tbptt.py --task.piece 32 --microbatch-size 8

`Truncated` owns `train_batch`: each sequence of a batch is cut into pieces, each piece makes an update, and what the
network remembers is handed on without its gradient. It travels in `state.batch`, so that microbatches slice it.
"""

# B = batch, T = time, H = what is remembered

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from eventloop import State, StepOutcome, Task, hookimpl


class Follower(nn.Module):
    """Foretells the next value of each wave, of shape (B, T), from those before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.memory = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, values_BT: Tensor, memory_BH: Tensor) -> tuple[Tensor, Tensor]:
        seen_BTH, last_1BH = self.memory(values_BT[..., None], memory_BH[None].contiguous())
        return self.head(seen_BTH).squeeze(2), last_1BH[0]


class Truncated:
    """Makes an update of each piece of a batch of sequences.

    Args:
        piece: how many steps gradients go back at most.
        width: how much the network remembers.

    Source: Williams & Peng 1990, doi:10.1162/neco.1990.2.4.490.
    """

    name = "truncated"

    def __init__(self, piece: int, width: int) -> None:
        self.piece, self.width = piece, width
        self.remembered: list[Tensor] = []

    @hookimpl
    def train_batch(self, state: State) -> bool | StepOutcome:
        """Goes through the pieces in order; the last one says whether the schedulers move."""
        inputs_BT, targets_BT = state.batch
        memory_BH = inputs_BT.new_zeros(len(inputs_BT), self.width)
        stepped: bool | StepOutcome = False
        pieces = zip(inputs_BT.split(self.piece, 1), targets_BT.split(self.piece, 1), strict=True)
        for inputs, targets in pieces:
            state.batch = {"inputs": inputs, "targets": targets, "memory": memory_BH}
            stepped = state.update(self.piece_loss)
            memory_BH = torch.cat(self.remembered)
        return stepped

    def piece_loss(self, state: State) -> Tensor:
        """Returns the error over a piece, and keeps what is remembered at its end."""
        if state.microbatch_idx == 0:
            self.remembered = []
        part = state.microbatch
        foretold_BT, memory_BH = state.model(part["inputs"], part["memory"])
        self.remembered.append(memory_BH.detach())
        return mse_loss(foretold_BT, part["targets"])


def make_waves(num: int, length: int) -> Tensor:
    """Draws sums of two waves, of shape (num, length); the same each time."""
    generator = torch.Generator().manual_seed(0)
    pace, start = torch.rand(2, num, 2, 1, generator=generator)
    return ((0.2 + 0.6 * pace) * torch.arange(length) + 6.28 * start).sin().mean(1)


def task(lr: float = 0.01, batch_size: int = 32, piece: int = 16, width: int = 32) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate.
        batch_size: waves of a step.
        piece: how many steps gradients go back at most.
        width: how much the network remembers.
    """
    waves_BT = make_waves(256, 65)
    dataset = TensorDataset(waves_BT[:, :-1], waves_BT[:, 1:])
    return Task(
        model=lambda: Follower(width),
        train_dataloader=DataLoader(dataset, batch_size, shuffle=True),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr),
        algorithms=[Truncated(piece, width)],
        settings={"max_duration": "5ep", "clip_norm": 1.0},
    )
