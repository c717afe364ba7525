"""A training loop of one's own with strategy.run:

    paceline train --script examples/tensorflow/custom_loop.py --backend tensorflow --nproc 2

Prints the same losses on any number of workers.
"""

import json
import os

import numpy as np
import tensorflow as tf

config = json.loads(os.environ["TF_CONFIG"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()

rng = np.random.default_rng(0)
x = rng.standard_normal((256, 16)).astype("float32")
y = (x[:, :4].sum(1, keepdims=True) > 0).astype("float32")
GLOBAL_BATCH = 32
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))

with strategy.scope():
    seeded = tf.keras.initializers.GlorotUniform
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(32, activation="tanh", kernel_initializer=seeded(seed=1)),
            tf.keras.layers.Dense(1, kernel_initializer=seeded(seed=2)),
        ]
    )
    model.build((None, 16))
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)


@tf.function
def train_step(inputs):
    def step(batch):
        features, targets = batch
        with tf.GradientTape() as tape:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, model(features))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.reduce_sum(loss)

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, (inputs,)), axis=None)


for epoch in range(3):
    total = sum(float(train_step(batch)) for batch in distributed)
    if config["task"]["index"] == 0:
        print(f"epoch {epoch}: loss {total / (len(x) // GLOBAL_BATCH):.4f}", flush=True)
