"""What fits, before you start: memory and time of a training step, and the cheapest way that hardware allows."""

from .hardware import PRESETS as HARDWARE
from .hardware import Hardware, hardware
from .job import Job
from .memory import Estimate, estimate
from .model import ModelShape
from .module import MeasuredModel
from .planning import plan
from .presets import PRESETS as MODELS
from .result import Plan
from .states import MODES
from .time import Assumptions, StepTime, step_time

__all__ = [
    "HARDWARE",
    "MODELS",
    "MODES",
    "Assumptions",
    "Estimate",
    "Hardware",
    "Job",
    "MeasuredModel",
    "ModelShape",
    "Plan",
    "StepTime",
    "estimate",
    "hardware",
    "plan",
    "step_time",
]
