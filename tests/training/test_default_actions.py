"""The default answers to the actions of the loop."""

from __future__ import annotations

import torch


def test_gradients_are_clipped_by_norm_then_by_value(make_trainer, make_task, make_plugin):
    """The norm that is logged is that of the batch; clipped by value first it would be another."""
    grads, rows = [], []

    def write(state):
        for param, value in zip(state.model.parameters(), (3.0, 0.0), strict=True):
            param.grad = torch.full_like(param, value)

    made = make_plugin(
        after_backward=write,
        after_train_batch=lambda state: grads.extend(p.grad for p in state.model.parameters()),
        log=lambda numbers: rows.append(numbers),
    )
    settings = {"clip_norm": 4.5, "clip_value": 1.0, "max_duration": "1ba"}
    make_trainer(algorithms=[made], **settings).fit()

    # 9 weights of 3.0 have the norm 9; at 4.5 each is 1.5, which is clipped to 1.
    assert rows[0]["train/grad_norm"] == 9.0
    torch.testing.assert_close(grads[0].cpu(), torch.ones(3, 3), rtol=0, atol=0)
