"""Keras' callbacks: ModelCheckpoint, a schedule of the learning rate, BackupAndRestore.

    paceline train --script examples/tensorflow/callbacks.py --backend tensorflow --nproc 2 \\
        --set launch.max_restarts=1

BackupAndRestore goes on with the epoch that a worker's end has cut off, once the launcher has
started the workers again. With CRASH_IN_EPOCH=2 one of them ends itself, to show it.
"""

import json
import os
import signal

import numpy as np
import tensorflow as tf

config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
strategy = tf.distribute.MultiWorkerMirroredStrategy()

rng = np.random.default_rng(0)
x = rng.standard_normal((256, 16)).astype("float32")
y = (x[:, :4].sum(1) > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

with strategy.scope():
    seeded = tf.keras.initializers.GlorotUniform
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(32, activation="relu", kernel_initializer=seeded(seed=1)),
            tf.keras.layers.Dense(2, kernel_initializer=seeded(seed=2)),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


class Crash(tf.keras.callbacks.Callback):
    """Ends the last worker in the middle of an epoch, the first time."""

    def on_epoch_begin(self, epoch, logs=None):
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        is_last = index == len(config["cluster"]["worker"]) - 1
        if first_start and is_last and epoch == int(os.environ.get("CRASH_IN_EPOCH", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)


# Every worker saves, as sums over workers need all of them; those after the first elsewhere.
folder = "saved" if index == 0 else f"saved/others/{index}"
history = model.fit(
    dataset,
    epochs=4,
    verbose=0,
    callbacks=[
        tf.keras.callbacks.BackupAndRestore("saved/backup"),
        tf.keras.callbacks.ModelCheckpoint(f"{folder}/model.weights.h5", save_weights_only=True),
        tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * 0.5**epoch),
        Crash(),
    ],
)
if index == 0:
    for epoch, loss in zip(history.epoch, history.history["loss"], strict=True):
        print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
