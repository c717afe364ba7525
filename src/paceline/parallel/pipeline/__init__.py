"""Pipeline parallelism: a model cut into stages that work on microbatches one after the other.

``cutting.py`` cuts a model into stages (``cut_plan.py`` is the result, ``units.py`` says between
which modules); ``pipeline.py`` runs the stages of one rank, ``stage.py`` one of them,
``schedules.py`` in which order; ``activations.py`` is what they send each other,
``tied_weights.py`` what several of them hold, ``split_backward.py`` the backward of zero-bubble
schedules in two halves.
"""

from paceline.options import Pipelining
from paceline.parallel.pipeline.cut_plan import CutPlan
from paceline.parallel.pipeline.cutting import cut
from paceline.parallel.pipeline.pipeline import Pipeline
from paceline.parallel.pipeline.stage import StageModule

__all__ = ["CutPlan", "Pipeline", "Pipelining", "StageModule", "cut"]
