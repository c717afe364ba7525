"""Sentences of uneven length in two classes, as Accelerate's nlp_example: accumulation, clipping, a
schedule with warm-up, and metrics on data that does not divide evenly.

paceline train --script examples/accelerate/nlp.py --nproc 2
torchrun --nproc-per-node 2 examples/accelerate/nlp.py --library accelerate
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--library", choices=["paceline", "accelerate"], default="paceline")
parser.add_argument("--batch-size", type=int, default=16, help="over all ranks")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=2e-2)
args = parser.parse_args()

PAD, WORDS, PASSES = 0, 50, 2


def make_accelerator():
    """The one place where the two libraries differ."""
    if args.library == "paceline":
        import paceline

        return paceline.Accelerator(accumulate=PASSES, batch_size_is="global")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    whole = DataLoaderConfiguration(split_batches=True)
    return Accelerator(cpu=True, gradient_accumulation_steps=PASSES, dataloader_config=whole)


def sentences(count, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(3, 12, (), generator=g))
        words = torch.randint(1, WORDS, (length,), generator=g)
        yield words, int(words.float().mean() > WORDS / 2)


def collate(samples):
    words, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD), torch.tensor(
        labels
    )


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=PAD)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, words):
        mask = (words != PAD).unsqueeze(-1)
        return self.head((self.embedding(words) * mask).sum(1) / mask.sum(1))


def main():
    torch.manual_seed(42)
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    train = DataLoader(list(sentences(128, 0)), args.batch_size, collate_fn=collate)
    test = DataLoader(list(sentences(45, 1)), args.batch_size, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train) // PASSES
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 3, (steps - step) / steps)
    )
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for words, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(words), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean())
        model.eval()
        right = []
        for words, labels in test:
            with torch.no_grad():
                predictions = model(words).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == labels).tolist()
        accuracy = sum(right) / len(right)
        accelerator.print(
            f"epoch {epoch}: loss {torch.stack(losses).mean():.6f}, "
            f"accuracy {accuracy:.4f} of {len(right)}"
        )


if __name__ == "__main__":
    main()
