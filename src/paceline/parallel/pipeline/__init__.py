"""Pipeline parallelism: a model cut into stages that work on microbatches one after the other."""

from paceline.parallel.pipeline.cut_plan import CutPlan
from paceline.parallel.pipeline.cutting import cut
from paceline.parallel.pipeline.options import Pipelining
from paceline.parallel.pipeline.pipeline import Pipeline
from paceline.parallel.pipeline.stage import StageModule

__all__ = ["CutPlan", "Pipeline", "Pipelining", "StageModule", "cut"]
