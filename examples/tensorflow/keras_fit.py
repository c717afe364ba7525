"""Keras' own fit on several workers, as its users write it:

    paceline train --script examples/tensorflow/keras_fit.py --backend tensorflow --nproc 2

Prints the same losses on any number of workers.
"""

import json
import os

import numpy as np
import tensorflow as tf

config = json.loads(os.environ["TF_CONFIG"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()

rng = np.random.default_rng(0)
images = rng.random((512, 8, 8, 1), dtype=np.float32)
labels = (images.mean((1, 2, 3)) * 10 % 10).astype("int64")
GLOBAL_BATCH = 64
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(GLOBAL_BATCH)

with strategy.scope():
    seeded = tf.keras.initializers.GlorotUniform
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_initializer=seeded(seed=1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, kernel_initializer=seeded(seed=2)),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.Adam(1e-3),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(dataset, epochs=3, verbose=0)
if config["task"]["index"] == 0:
    for epoch, loss in enumerate(history.history["loss"]):
        print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
