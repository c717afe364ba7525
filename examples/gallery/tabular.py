"""Tabular data: numbers and categories from a CSV file, rare positives, predictions to a file.

python tabular.py --nproc 2
python tabular.py --nproc 2 --resume --epochs 30      # goes on where it ended

The script brings up its own ranks: no launcher is needed, and it works the same in a notebook.
"""

import argparse
import csv
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

NUMBERS = ["age", "months", "calls", "bill"]
CATEGORIES = {"plan": ["basic", "family", "premium"], "paid_by": ["card", "bank", "cash"]}


def write_example(file: Path, rows: int) -> None:
    """Customers and whether they left. Yours is a CSV file with columns of its own."""
    rng = random.Random(0)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*NUMBERS, *CATEGORIES, "left"])
        for _ in range(rows):
            plan, paid_by = (rng.choice(values) for values in CATEGORIES.values())
            months, calls = rng.randint(1, 60), rng.randint(0, 9)
            risk = 0.5 * calls - 0.08 * months + (plan == "basic") * (calls > 4) * 2 - 1
            left = int(risk + rng.gauss(0, 0.7) > 0)
            bill = round(rng.uniform(10, 80), 2)
            writer.writerow([rng.randint(18, 90), months, calls, bill, plan, paid_by, left])


def read(file: Path) -> tuple[TensorDataset, TensorDataset]:
    """Training and validation data: (numbers, categories, target)."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    numbers = torch.tensor([[float(row[name]) for name in NUMBERS] for row in rows])
    codes = {name: {v: i for i, v in enumerate(values)} for name, values in CATEGORIES.items()}
    categories = torch.tensor([[codes[name][row[name]] for name in codes] for row in rows])
    target = torch.tensor([float(row["left"]) for row in rows])
    split = len(rows) * 4 // 5  # the file is in random order; shuffle with a seed where it is not
    # Scaled by what the training rows show: the validation rows must not have a say in it.
    numbers = (numbers - numbers[:split].mean(dim=0)) / numbers[:split].std(dim=0)
    parts = numbers, categories, target
    return TensorDataset(*(p[:split] for p in parts)), TensorDataset(*(p[split:] for p in parts))


class Table(nn.Module):
    """Called with all but the last part of a sample; the last is the target."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(len(v), 4) for v in CATEGORIES.values())
        inputs = len(NUMBERS) + 4 * len(CATEGORIES)
        self.net = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        embedded = [layer(categories[:, i]) for i, layer in enumerate(self.embeddings)]
        return self.net(torch.cat([numbers, *embedded], dim=1)).squeeze(1)


def auc(output: torch.Tensor, target: torch.Tensor) -> float:
    """How often a customer who left has a higher score than one who stayed."""
    left, stayed = output[target == 1], output[target == 0]
    return (left[:, None] > stayed[None, :]).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("customers.csv"))
    parser.add_argument("--nproc", type=int, default=1, help="ranks to bring up")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run-dir", default="runs/tabular")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    if not options.data.exists():
        write_example(options.data, rows=300 if options.tiny else 4000)
    train, val = read(options.data)
    positives = train.tensors[2].mean()

    torch.manual_seed(0)
    model = Table()
    trainer = paceline.Trainer(
        model,
        # A positive weighs as much as all the negatives that it stands against.
        loss=nn.BCEWithLogitsLoss(pos_weight=(1 - positives) / positives),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=64,
        # An AUC of parts cannot be averaged: WholeSet computes it once, on everything.
        metrics={"auc": paceline.WholeSet(auc)},
        callbacks=[paceline.EarlyStopping("auc", mode="max", patience=4)],
        checkpoint=paceline.Checkpointing(every_epoch=True, best="auc", mode="max"),
        run_dir=options.run_dir,
    )
    epochs = options.epochs // 10 if options.tiny else options.epochs
    history = trainer.fit(train, val, epochs=epochs, nproc=options.nproc, resume=options.resume)
    best = history.best("auc", mode="max")
    print(f"best: AUC {best.metrics['auc']:.4f} at step {best.step}")

    # Scores of the best weights, a line for each row of the data, in its order.
    scores = trainer.predict(
        val, which="best", take=torch.sigmoid, out="scores.jsonl", overwrite=True
    )
    print(*Path(scores).read_text().splitlines()[:3], sep="\n")


if __name__ == "__main__":
    main()
