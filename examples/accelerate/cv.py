"""Pictures in four classes, as Accelerate's complete_cv_example: a state saved after every epoch,
and resuming from one (-- --resume-from-checkpoint states/epoch_1).

paceline train --script examples/accelerate/cv.py --nproc 2
torchrun --nproc-per-node 2 examples/accelerate/cv.py --library accelerate
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--library", choices=["paceline", "accelerate"], default="paceline")
parser.add_argument("--batch-size", type=int, default=16, help="over all ranks")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--stop-after", type=int, help="end after so many epochs, as a killed job does")
parser.add_argument("--output-dir", default="states")
parser.add_argument("--resume-from-checkpoint")
args = parser.parse_args()


def make_accelerator():
    """The one place where the two libraries differ."""
    if args.library == "paceline":
        import paceline

        return paceline.Accelerator(batch_size_is="global")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    whole = DataLoaderConfiguration(split_batches=True)
    return Accelerator(cpu=True, dataloader_config=whole, step_scheduler_with_optimizer=False)


def pictures(count, seed):
    """A bright quarter on noise."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=g)
    images = torch.randn(count, 1, 8, 8, generator=g)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return TensorDataset(images, labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, 4)

    def forward(self, images):
        return self.head(self.body(images))


def main():
    torch.manual_seed(42)
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    train = DataLoader(pictures(128, 0), args.batch_size)
    test = DataLoader(pictures(45, 1), args.batch_size)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # stepped after each epoch
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    first = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first = int(args.resume_from_checkpoint.rpartition("_")[2]) + 1
    for epoch in range(first, min(args.epochs, args.stop_after or args.epochs)):
        model.train()
        losses = []
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean())
        schedule.step()
        model.eval()
        right = []
        for images, labels in test:
            with torch.no_grad():
                predictions = model(images).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == labels).tolist()
        accelerator.print(
            f"epoch {epoch}: loss {torch.stack(losses).mean():.6f}, "
            f"accuracy {sum(right) / len(right):.4f} of {len(right)}"
        )
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))


if __name__ == "__main__":
    main()
