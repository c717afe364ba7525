"""TensorFlow and the two Keras: which is installed, and which a model is made of.

``tf.keras`` is Keras 3, or ``tf_keras`` (Keras 2) where ``TF_USE_LEGACY_KERAS=1`` was set before
TensorFlow was imported. ``fit`` of Keras 3 cannot train under ``MultiWorkerMirroredStrategy``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from paceline.errors import MissingExtra

LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
KERAS_3_FAILS = (
    "fit of Keras 3 cannot train under MultiWorkerMirroredStrategy; that of tf_keras can"
)
_QUIET = "TF_CPP_MIN_LOG_LEVEL"


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported; it is not."""
    return module in sys.modules or importlib.util.find_spec(module) is not None


def require_tensorflow() -> None:
    """Raise where TensorFlow is not installed; it is not imported."""
    if not is_installed("tensorflow"):
        raise MissingExtra("TensorFlow", "tensorflow")


def import_tensorflow() -> Any:
    """The module ``tensorflow``, without its greetings on the terminal."""
    require_tensorflow()
    os.environ.setdefault(_QUIET, "2")
    return importlib.import_module("tensorflow")


def prefer_legacy_keras() -> bool:
    """Have ``tf.keras`` be ``tf_keras``, where that is possible; whether it will be.

    Only before TensorFlow is imported, and not where the user has decided.
    """
    is_open = LEGACY_KERAS not in os.environ and "tensorflow" not in sys.modules
    if is_open and is_installed("tf_keras"):
        os.environ[LEGACY_KERAS] = "1"
    return os.environ.get(LEGACY_KERAS, "").lower() in ("1", "true")


def keras_of(model: Any) -> Any:
    """The Keras module that ``model`` is made of: ``keras`` or ``tf_keras``; ``None`` if none."""
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ == "Model" and package in ("keras", "tf_keras"):
            return importlib.import_module(package)
    return None


def is_keras_3(keras: Any) -> bool:
    """Whether a Keras module is Keras 3."""
    return keras.__name__ == "keras"
