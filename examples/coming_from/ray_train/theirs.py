import os
import tempfile

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop(config):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    # Each of two workers reads 8 samples for a step.
    loader = DataLoader(dataset, batch_size=8)
    loader = ray.train.torch.prepare_data_loader(loader)

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loss_fn = nn.MSELoss()

    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
            losses.append(mean.item())
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), f"{folder}/model.pt")
            checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"losses": losses}, checkpoint=checkpoint)


trainer = TorchTrainer(
    train_loop,
    train_loop_config={"lr": 1e-2},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("results")),
)
result = trainer.fit()
for loss in result.metrics["losses"]:
    print(f"loss {loss:.6f}")
