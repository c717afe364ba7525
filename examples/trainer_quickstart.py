"""A model, a dataset, and two ranks that the script brings up: `python trainer_quickstart.py`.

No launcher and no `if __name__ == "__main__"` are needed. Under a launcher (`paceline train
--script`, torchrun) drop nproc: the script then joins the ranks it was started on.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(2000, 8)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()  # the sign of a product: not linear
train = TensorDataset(inputs[:1800], labels[:1800])
val = TensorDataset(inputs[1800:], labels[1800:])

model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


trainer = paceline.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=60,
    clip_norm=1.0,
    metrics={"accuracy": accuracy},
    callbacks=[paceline.EarlyStopping("loss", patience=5)],
)
history = trainer.fit(train, val, epochs=10, nproc=2)

print(history)
print("accuracy by epoch:", [round(value, 3) for value in history.metric("accuracy")])
with torch.no_grad():  # the trained weights are in the script's own model
    print("accuracy here:    ", round(float(accuracy(model(inputs[1800:]), labels[1800:])), 3))
