"""Pipeline parallelism: a model cut into stages that work on microbatches one after the other."""

from paceline.options import Pipelining
from paceline.parallel.pipeline.cutting import cut
from paceline.parallel.pipeline.plan import CutPlan
from paceline.parallel.pipeline.runtime import Pipeline
from paceline.parallel.pipeline.stage import StageModule

__all__ = ["CutPlan", "Pipeline", "Pipelining", "StageModule", "cut"]
