"""Callbacks written for BigDL Orca's runner, unchanged, in eventloop."""

from eventloop_orca.callbacks import Callback, MainCallback
from eventloop_orca.plugin import Orca
from eventloop_orca.runner import Runner

# Orca's document spells the name in both ways.
MainCallBack = MainCallback

__all__ = ["Callback", "MainCallBack", "MainCallback", "Orca", "Runner"]
