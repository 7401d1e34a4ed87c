# ruff: noqa: I001  names of one module stay together
"""What `eventloop` exports, each name with its module, which is imported when the name is first used."""

from . import schedules as schedules
from .clock import (
    Clock as Clock,
    Moment as Moment,
    Time as Time,
)
from .config.settings import Settings as Settings
from .data.batches import Count as Count
from .distributed import rank_zero_first as rank_zero_first
from .errors import (
    CheckpointError as CheckpointError,
    EventloopError as EventloopError,
    NonFiniteError as NonFiniteError,
    PluginError as PluginError,
    ReadOnlyStateError as ReadOnlyStateError,
    ResumeError as ResumeError,
    RunFolderError as RunFolderError,
    SettingError as SettingError,
    TaskError as TaskError,
    UsageError as UsageError,
)
from .hook_markers import (
    hookimpl as hookimpl,
    hookspec as hookspec,
)
from .run.result import Result as Result
from .run.differences import Allowed as Allowed
from .signals import is_interruption as is_interruption
from .state import State as State
from .task import Task as Task
from .trainer import (
    Trainer as Trainer,
    TrainerBuilder as TrainerBuilder,
    fit as fit,
)
from .training.grad_scaling import StepOutcome as StepOutcome
from .urls import Url as Url
from .view import StateView as StateView

__version__: str
__all__: list[str]
