"""Image classification: a small convolutional network that reads noisy digits.

python digits.py
python digits.py --resume --epochs 9               # goes on where it ended
paceline train --script digits.py --nproc 2        # the same run on two ranks
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

# A font of five columns each; the bits of a byte are the pixels of a column, the lowest on top.
FONT = (
    "3e5149453e 00427f4000 4261514946 2141454b31 1814127f10 "
    "2745454539 3c4a494930 0171090503 3649494936 064949291e"
)


class Digits(Dataset):
    """Noisy pictures of 14 x 14 pixels; put your own data in its place."""

    def __init__(self, count: int, seed: int, augment: bool = False) -> None:
        columns = torch.tensor([list(bytes.fromhex(digit)) for digit in FONT.split()])
        glyphs = (columns[:, None, :] >> torch.arange(7)[:, None]) & 1  # (10, 7, 5)
        # Seeded: every rank makes the dataset for itself, and all must make the same.
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        images = F.pad(glyphs[self.labels].float(), (4, 5, 3, 4))
        self.images = images + 0.3 * torch.randn(images.shape, generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            # Drawn from torch's own generator, the shift depends on the seed, the epoch and the
            # sample: it is the same on any number of ranks and workers, and after a resume.
            down, right = torch.randint(-2, 3, (2,)).tolist()
            image = image.roll((down, right), dims=(0, 1))
        return image[None], self.labels[index]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--layout", default="auto", help="such as dp=2,zero=3 or tp=2")
    parser.add_argument("--run-dir", default="runs/digits")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()

    size = 64 if options.tiny else 3000
    train = Digits(size, seed=1, augment=True)
    val, test = Digits(size // 5, seed=2), Digits(size // 5, seed=3)

    torch.manual_seed(0)
    model = make_model()
    trainer = paceline.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=4e-3),
        global_batch=32,  # over all ranks: the run is the same on one and on many
        layout=options.layout,
        metrics={"accuracy": accuracy},
        # Stops when the accuracy has not improved for three epochs; keeps the best weights.
        callbacks=[paceline.EarlyStopping("accuracy", mode="max", patience=3)],
        checkpoint=paceline.Checkpointing(every_epoch=True, best="accuracy", mode="max"),
        run_dir=options.run_dir,
    )
    epochs = options.epochs // 3 if options.tiny else options.epochs
    history = trainer.fit(train, val, epochs=epochs, resume=options.resume)

    for epoch, value in enumerate(history.metric("accuracy"), 1):
        print(f"epoch {epoch}: validation accuracy {value:.3f}")
    # The test set is looked at once, with the weights that did best on the validation set.
    metrics = trainer.evaluate(test, which="best")
    print(f"test: accuracy {metrics['accuracy']:.3f}, loss {metrics['loss']:.4f}")
    classes = trainer.predict(test, take=lambda output: output.argmax(dim=1))
    print("the first ten:", classes[:10].tolist(), "should be", test.labels[:10].tolist())


if __name__ == "__main__":
    main()
