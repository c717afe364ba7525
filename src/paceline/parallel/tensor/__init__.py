"""Tensor parallelism: the layers of a model spread over ranks, on DTensor.

``planning.py`` decides which layers are split (the user's patterns, ``huggingface.py``, or
``infer.py``, which follows a forward pass), ``checks.py`` holds ``tp`` against heads and features,
``apply.py`` splits the parameters, and ``dispatch.py`` is the context in which the model then runs,
with ``attention.py``, ``dropout.py``, ``linear.py`` and ``vocabulary.py`` for the layers.
"""

from paceline.options import TensorParallel as TensorParallel
from paceline.parallel.tensor.apply import apply_plan as apply_plan
from paceline.parallel.tensor.dispatch import mixing as mixing
from paceline.parallel.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
from paceline.parallel.tensor.linear import RowParallelLinear as RowParallelLinear
from paceline.parallel.tensor.plan import TensorPlan as TensorPlan
from paceline.parallel.tensor.plan import common_plan as common_plan
from paceline.parallel.tensor.planning import make_plan as make_plan
from paceline.parallel.tensor.shards import full_tensor as full_tensor
from paceline.parallel.tensor.shards import local_of as local_of
from paceline.parallel.tensor.shards import plain as plain
from paceline.parallel.tensor.split_forms import SplitForms as SplitForms
