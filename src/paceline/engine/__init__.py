"""The engine: precision, accumulation, clipping, the step."""

from paceline.engine.engine import Engine
from paceline.engine.prepare import prepare
from paceline.engine.result import StepResult
from paceline.options import EngineOptions

__all__ = ["Engine", "EngineOptions", "StepResult", "prepare"]
