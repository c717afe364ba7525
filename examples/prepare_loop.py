"""Keep your own `loss.backward()`: `prepare` distributes model, optimizer and data over the ranks.

python prepare_loop.py
paceline train --script prepare_loop.py --nproc 3
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(250, 4)
data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(data, batch_size=32, shuffle=True)  # 32 is the global batch

model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # averages over all ranks, weighted by their samples
        optimizer.step()
    if paceline.World.current().is_main:
        print(f"epoch {epoch}: loss on rank 0's last batch {loss.item():.4f}")
