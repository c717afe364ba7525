"""TensorFlow and Keras on Paceline: ``TensorFlowTrainer``, and ``--backend tensorflow``.

``paceline train --script keras_script.py --backend tensorflow`` starts the workers of a
``tf.distribute.MultiWorkerMirroredStrategy``. TensorFlow is imported when a trainer is used, not
before: ``pip install 'paceline[tensorflow]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.compat.tensorflow.trainer import TensorFlowTrainer

__all__ = ["TensorFlowTrainer"]


def __getattr__(name: str) -> Any:
    # The command line reads scripts with this package, and has no time for torch.
    if name == "TensorFlowTrainer":
        from paceline.compat.tensorflow.trainer import TensorFlowTrainer

        return TensorFlowTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
