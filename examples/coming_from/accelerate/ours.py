import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

accelerator = paceline.Accelerator(accumulate=2)
torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
# All ranks together read 8 samples, twice for a step.
loader = DataLoader(dataset, batch_size=8)

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = nn.MSELoss()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"loss {mean.item():.6f}")
