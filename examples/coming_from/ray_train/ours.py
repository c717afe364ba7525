import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
# All ranks together read 16 samples for a step.
loader = DataLoader(dataset, batch_size=16)

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
trainer = paceline.Trainer(
    model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    loss=nn.MSELoss(),
)
history = trainer.fit(loader, epochs=2)
for loss in history.losses:
    print(f"loss {loss:.6f}")
