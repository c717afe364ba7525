import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        mean = self.all_gather(loss.detach()).mean()
        self.print(f"loss {mean.item():.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        sampler = DistributedSampler(dataset, shuffle=False)
        # Each of two ranks reads 8 samples for a step.
        return DataLoader(dataset, batch_size=8, sampler=sampler)


torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))

trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    use_distributed_sampler=False,  # it would shuffle
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Regression())
