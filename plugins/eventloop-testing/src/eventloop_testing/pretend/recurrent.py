"""Cells of recurrent networks, which torch computes with kernels of GPUs on devices outside of it.

The sums are those of the kernels, in another order than on the CPU: the last bits differ from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eventloop_testing.pretend import private

# B = batch, G = gates times units


def implement() -> None:
    """Registers them, made of operators that autograd and the device know."""
    private.implement("_thnn_fused_lstm_cell", _lstm_cell, private.AUTOGRAD_KEY)
    private.implement("_thnn_fused_gru_cell", _gru_cell, private.AUTOGRAD_KEY)


def _lstm_cell(
    input_gates_BG: Tensor,
    hidden_gates_BG: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates_BG = _biased(input_gates_BG, input_bias) + _biased(hidden_gates_BG, hidden_bias)
    into, forget, cell, out = gates_BG.chunk(4, 1)
    cy = forget.sigmoid() * cx + into.sigmoid() * cell.tanh()
    return out.sigmoid() * cy.tanh(), cy, gates_BG


def _gru_cell(
    input_gates_BG: Tensor,
    hidden_gates_BG: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    of_input = _biased(input_gates_BG, input_bias).chunk(3, 1)
    of_hidden = _biased(hidden_gates_BG, hidden_bias).chunk(3, 1)
    reset = torch.sigmoid(of_input[0] + of_hidden[0])
    update = torch.sigmoid(of_input[1] + of_hidden[1])
    new = torch.tanh(of_input[2] + reset * of_hidden[2])
    return new + update * (hx - new), hidden_gates_BG


def _biased(gates_BG: Tensor, bias: Tensor | None) -> Tensor:
    return gates_BG if bias is None else gates_BG + bias
