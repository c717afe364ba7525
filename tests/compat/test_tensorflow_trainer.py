"""TensorFlowTrainer: what it refuses, and (where TensorFlow is installed) what it trains."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.compat.tensorflow import TensorFlowTrainer
from paceline.compat.tensorflow import trainer as trainer_module
from paceline.compat.tensorflow.fit_loop import Segment, segments
from paceline.errors import DataError, MissingExtra, TrainingError

OWN_FOLDER = Path(__file__).parents[2] / ".tensorflow"
"""TensorFlow of its own, so that the other tests' libraries do not find and import it."""
HAS_TENSORFLOW = OWN_FOLDER.is_dir() or importlib.util.find_spec("tensorflow") is not None


def build() -> None:
    """Stands in for what builds a model; it is not called."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "require_tensorflow", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"strategy": "ddp"},
            TrainingError,
            "strategy='ddp' must be one of auto, mirrored, multi_worker, or a tf.distribute.Strategy.",
        ),
        (
            {"global_batch": 8, "per_device_batch": 4},
            DataError,
            "global_batch=8 and per_device_batch=4 both say how many samples a step takes. Give "
            "one of them.",
        ),
        (
            {"callbacks": [3]},
            TrainingError,
            "callbacks: 3 is neither a callback of Keras nor a paceline.Callback.",
        ),
    ],
)
def test_arguments_that_are_refused(
    installed: None, arguments: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as refused:
        TensorFlowTrainer(build, **arguments)  # type: ignore[arg-type]
    assert str(refused.value) == said


def test_a_model_must_be_one_or_a_function(installed: None) -> None:
    with pytest.raises(TrainingError, match="must be a Keras model, or a function that builds one"):
        TensorFlowTrainer(3)
    with pytest.raises(TrainingError, match="unknown argument batch_size"):
        TensorFlowTrainer(build, batch_size=3)  # type: ignore[call-arg]


def test_fit_refuses_before_anything_is_built(installed: None, tmp_path: Path) -> None:
    trainer = TensorFlowTrainer(build, global_batch=4)
    for arguments, said in (
        ({}, "give exactly one of epochs and steps"),
        ({"epochs": 1, "resume": "auto"}, "needs a run_dir to resume from"),
        ({"epochs": 1, "max_restarts": -1}, "must be a whole number, 0 or more"),
    ):
        with pytest.raises(TrainingError, match=said):
            trainer.fit(([1], [2]), **arguments)  # type: ignore[arg-type]
    mirrored = TensorFlowTrainer(build, strategy="mirrored", global_batch=4)
    with pytest.raises(TrainingError, match="trains with strategy='multi_worker', not 'mirrored'"):
        mirrored.fit(([1], [2]), epochs=1, nproc=2)


def test_tensorflow_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "tensorflow" else found(n, *a)
    )
    with pytest.raises(MissingExtra, match=r"pip install 'paceline\[tensorflow\]'"):
        TensorFlowTrainer(build)


@pytest.mark.parametrize(
    ("first", "total", "expected"),
    [
        (0, 12, [Segment(0, 0, 2, 6)]),
        (4, 18, [Segment(4, 0, 1, 2), Segment(6, 1, 2, 6)]),
        (6, 14, [Segment(6, 1, 1, 6), Segment(12, 2, 1, 2)]),
        (13, 15, [Segment(13, 2, 1, 2)]),
        (12, 12, []),
    ],
)
def test_a_run_is_whole_epochs_and_parts(first: int, total: int, expected: list[Segment]) -> None:
    assert list(segments(first, total, 6)) == expected


TRAINS = """
import os, signal
import numpy as np
import paceline
from paceline.compat.tensorflow import TensorFlowTrainer

rng = np.random.default_rng(0)
x = rng.standard_normal((43, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


def build():
    import tensorflow as tf

    k = tf.keras
    seeded = k.initializers.GlorotUniform
    model = k.Sequential(
        [
            k.layers.Dense(8, activation="relu", kernel_initializer=seeded(seed=1)),
            k.layers.Dense(2, kernel_initializer=seeded(seed=2)),
        ]
    )
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(k.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class Kill(paceline.Callback):
    def on_step_end(self, trainer, result):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and os.environ["RANK"] == "1" and result.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)


def make(run_dir=None, **more):
    options = dict(global_batch=8, progress=False, run_dir=run_dir)
    return TensorFlowTrainer(build, **{**options, **more})


data = (x, y), (x[:11], y[:11])
every = paceline.Checkpointing(every=4)
two = make("two", checkpoint=every, callbacks=[Kill()])
two.fit(*data, epochs=3, nproc=2)  # a worker is killed at step 9, and the last batch is uneven
killed = paceline.History.read("two")
alone = make().fit(*data, epochs=3)
# The order of sums alone differs: a few units in the last place of float32 after 18 Adam steps.
np.testing.assert_allclose(killed.losses, alone.losses, rtol=2e-6)
np.testing.assert_allclose(killed.metric("loss"), alone.metric("loss"), rtol=2e-6)
assert len(killed.restarts) == 1 and len(killed.losses) == 18, killed
assert [e.samples for e in killed.epochs] == [43] * 3
assert abs(two.evaluate(data[1])["loss"] - alone.val_loss) < 1e-6
assert two.predict(x).shape == (43, 2)

part = make("part", checkpoint=every)
part.fit(*data, steps=7)
on = make("part").fit(*data, epochs=3, resume="auto")
np.testing.assert_allclose(on.losses, alone.losses, rtol=0, atol=0)

# What Keras alone computes, batch by batch in the same order.
from paceline.data.shuffle_order import Order

model, order = build(), Order(43, 0, True)
for epoch in range(3):
    indices = order.indices(epoch, 0, 43).numpy()
    for at in range(0, 43, 8):
        own = indices[at : at + 8]
        model.reset_metrics()
        loss = model.train_on_batch(x[own], y[own])[0]
        step = epoch * 6 + at // 8
        np.testing.assert_allclose(alone.losses[step], loss, rtol=1e-6)
print("as one process")
"""


@pytest.mark.skipif(
    not HAS_TENSORFLOW, reason="pip install --target .tensorflow tensorflow tf_keras"
)
def test_two_workers_one_killed_train_as_one_process(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    path = os.pathsep.join([str(OWN_FOLDER), os.environ.get("PYTHONPATH", "")])
    settings = {"CUDA_VISIBLE_DEVICES": "-1", "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "trains.py"],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.splitlines()[-1:] == ["as one process"], done.stderr[-4000:]
