"""The ``tf.distribute.Strategy`` of a trainer, and its model built and compiled under it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from paceline.compat.tensorflow.cluster import TF_CONFIG, join_cluster
from paceline.compat.tensorflow.library import (
    KERAS_3_FAILS,
    LEGACY_KERAS,
    import_tensorflow,
    is_keras_3,
    keras_of,
)
from paceline.errors import TrainingError
from paceline.formatting import one_of
from paceline.launch.environment import Environment

STRATEGIES = ("auto", "mirrored", "multi_worker")


def check_strategy(strategy: Any) -> None:
    """Refuse what is neither the name of a strategy nor one."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise TrainingError(
                f"strategy={strategy!r} must be {one_of(STRATEGIES)}, or a tf.distribute.Strategy."
            )
    elif not hasattr(strategy, "scope") or not hasattr(strategy, "num_replicas_in_sync"):
        raise TrainingError(
            f"strategy must be {one_of(STRATEGIES)}, or a tf.distribute.Strategy, not a "
            f"{type(strategy).__name__}."
        )


def check_model(model: Any) -> None:
    """Refuse what is neither a Keras model nor a function."""
    if keras_of(model) is None and not callable(model):
        raise TrainingError(
            f"model must be a Keras model, or a function that builds one, not a "
            f"{type(model).__name__}."
        )


def make_strategy(strategy: Any, env: Environment | None) -> Any:
    """The strategy that ``strategy`` names, in the world of ``env``."""
    tf = import_tensorflow()
    size = 1 if env is None else env.size
    if not isinstance(strategy, str):
        if strategy.num_replicas_in_sync < size:
            raise TrainingError(
                f"{type(strategy).__name__} has {strategy.num_replicas_in_sync} replica(s), but "
                f"{size} ranks were started: each would train by itself. Use "
                "strategy='multi_worker', or start one rank."
            )
        return strategy
    if strategy == "mirrored":
        if size > 1:
            raise TrainingError(
                f"strategy='mirrored' is for the devices of one process, but {size} ranks were "
                "started. Use strategy='multi_worker' or 'auto', or start one rank."
            )
        return tf.distribute.MirroredStrategy()
    if strategy == "multi_worker" or size > 1:
        if env is not None:
            join_cluster(env)
        else:
            _refuse_foreign_cluster()
        return _multi_worker(tf)
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def _refuse_foreign_cluster() -> None:
    try:
        workers = len(json.loads(os.environ.get(TF_CONFIG, "{}"))["cluster"]["worker"])
    except (ValueError, KeyError, TypeError):
        return
    if workers > 1:
        raise TrainingError(
            f"{TF_CONFIG} names {workers} workers, but no launcher that Paceline knows has started "
            "this process. Start it with: paceline train --script FILE --backend tensorflow, or "
            f"unset {TF_CONFIG}."
        )


def _multi_worker(tf: Any) -> Any:
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        if "startup" not in str(error):
            raise
        raise TrainingError(
            "strategy='multi_worker': TensorFlow has computed something already, and its workers "
            "must be connected before. Give the model as a function that builds it, and data as "
            "NumPy arrays or as a function that makes the dataset."
        ) from error


def is_default(strategy: Any) -> bool:
    """Whether it is the strategy of a program that has none."""
    return type(strategy).__name__ == "_DefaultDistributionStrategy"


def build_model(given: Any, strategy: Any, env: Environment | None) -> Any:
    """The model, its variables made under the scope of ``strategy``."""
    if keras_of(given) is None:
        with strategy.scope():
            model = given()
        if keras_of(model) is None:
            name = getattr(given, "__name__", repr(given))
            raise TrainingError(
                f"model: {name}() returned a {type(model).__name__}; it must return a Keras model."
            )
    else:
        model = given if _belongs(given, strategy) else _rebuilt(given, strategy)
    if env is not None and env.size > 1 and is_keras_3(keras_of(model)):
        raise TrainingError(
            f"the model is one of Keras 3, and {env.size} workers were started: {KERAS_3_FAILS}. "
            f"Start with --backend tensorflow, or set {LEGACY_KERAS}=1, so that tf.keras is "
            "tf_keras; a model of import keras is to import tf_keras as keras."
        )
    _report_each_replica_once(model)
    return model


def _report_each_replica_once(model: Any) -> None:
    """The numbers of a batch in ``tf_keras`` are sums over replicas of what each knows for all."""
    keras = keras_of(model)
    if not is_keras_3(keras) and type(model).train_step is keras.Model.train_step:
        model.distribute_reduction_method = "first"


def _belongs(model: Any, strategy: Any) -> bool:
    if is_default(strategy):
        return True
    variables = [getattr(variable, "value", variable) for variable in model.variables]
    plain = [one() if callable(one) else one for one in variables]
    if hasattr(model, "distribute_strategy") and not plain:
        return model.distribute_strategy is strategy
    try:
        found = [strategy.extended.variable_created_in_scope(one) for one in plain]
    except (ValueError, AttributeError):
        found = [False]
    return bool(found) and all(found)


def _rebuilt(model: Any, strategy: Any) -> Any:
    """A copy of ``model`` under the scope of ``strategy``, with its weights, compiled as it was."""
    keras = keras_of(model)
    try:
        with strategy.scope():
            copied = keras.models.clone_model(model)
            if model.built:
                copied.set_weights(model.get_weights())
            if getattr(model, "optimizer", None) is not None:
                copied.compile_from_config(model.get_compile_config())
    except (ValueError, TypeError, NotImplementedError) as error:
        raise TrainingError(
            f"the model was built outside of the {type(strategy).__name__}, and cannot be built "
            f"again from its config ({error}). Give a function that builds it: "
            "TensorFlowTrainer(build_model, …)."
        ) from error
    return copied


def compile_model(
    model: Any,
    strategy: Any,
    optimizer: Any,
    loss: Any,
    metrics: Sequence[Any] | Callable[[], Sequence[Any]] | None,
) -> None:
    """Compile ``model`` with what was given, unless it is compiled and nothing was."""
    if optimizer is None and loss is None and metrics is None:
        if getattr(model, "optimizer", None) is None:
            raise TrainingError(
                "the model is not compiled. Compile it in the function that builds it, or give "
                "TensorFlowTrainer(optimizer=, loss=, metrics=)."
            )
        return
    if optimizer is None or loss is None:
        missing = "optimizer" if optimizer is None else "loss"
        raise TrainingError(
            f"TensorFlowTrainer compiles the model with optimizer, loss and metrics, but {missing} "
            "is missing. Give both optimizer and loss, or none of them and a compiled model."
        )
    with strategy.scope():
        given = metrics() if callable(metrics) else metrics
        model.compile(
            optimizer=_in_scope(optimizer, strategy),
            loss=loss,
            metrics=None if given is None else [_in_scope(one, strategy) for one in given],
        )


def _in_scope(part: Any, strategy: Any) -> Any:
    """An optimizer or a metric whose variables belong to ``strategy``; functions are called."""
    if hasattr(part, "get_config") and not isinstance(part, type):
        return part if is_default(strategy) else type(part).from_config(part.get_config())
    if isinstance(part, type) or (isinstance(part, FunctionType) and not _takes_arguments(part)):
        return part()
    return part


def _takes_arguments(function: FunctionType) -> bool:
    """A metric is a function of targets and predictions; what makes one takes nothing."""
    return bool(function.__code__.co_argcount)
