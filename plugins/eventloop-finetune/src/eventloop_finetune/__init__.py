"""Fine-tuning: groups of parameters by patterns of their names, frozen parts, parts that thaw."""

from eventloop_finetune.parameter_groups import SaveTrained, Unfreeze, freeze, param_groups

__all__ = ["SaveTrained", "Unfreeze", "freeze", "param_groups"]
