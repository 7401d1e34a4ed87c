"""Learning from preferences for eventloop: a task for DPO, IPO, KTO, ORPO, SimPO and CPO."""

from eventloop_dpo.from_command import task
from eventloop_dpo.losses import LOSSES, LossOptions, kto_losses, pair_losses
from eventloop_dpo.plugin import Preferences

__all__ = [
    "LOSSES",
    "LossOptions",
    "Preferences",
    "kto_losses",
    "pair_losses",
    "task",
]
