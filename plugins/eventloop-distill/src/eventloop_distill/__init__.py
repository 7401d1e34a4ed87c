"""Distillation for eventloop: a model learns from the outputs of another one."""

from eventloop_distill.plugin import Distill
from eventloop_distill.softened import soft_loss
from eventloop_distill.teacher import named_teacher

__all__ = ["Distill", "named_teacher", "soft_loss"]
