"""Text classification with a Hugging Face model that computes its own loss.

python text_classification.py
python text_classification.py --resume --epochs 6             # goes on where it ended
paceline train --script text_classification.py --nproc 2      # the same run on two ranks

Needs `pip install transformers`; downloads nothing.
"""

import argparse
import random
from typing import Any

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import paceline

GOOD = ["wonderful", "moving", "clever", "great", "a delight"]
BAD = ["boring", "dreadful", "clumsy", "a waste of time", "flat"]
THINGS = ["the plot", "the acting", "the music", "the ending", "the camera work", "every joke"]
PAD = 0  # no text has this byte
LENGTH = 40


def make_reviews(count: int, seed: int) -> list[dict[str, Any]]:
    """Short reviews and whether they are kind; a negation turns a word around."""
    rng = random.Random(seed)  # seeded: every rank makes the same data
    reviews = []
    for _ in range(count):
        label, negated = rng.randrange(2), rng.random() < 0.3
        word = rng.choice(GOOD if label != negated else BAD)
        verb = "was not" if negated else rng.choice(["was", "seemed", "is"])
        reviews.append({"text": f"{rng.choice(THINGS)} {verb} {word}", "label": label})
    return reviews


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch: bytes as tokens, padded to one length.

    With a tokenizer: `tokenizer(texts, padding="max_length", max_length=LENGTH, truncation=True)`.
    Padding to the longest text of a batch is right, too, and faster where lengths differ much. But
    each rank sees other texts, and dropout is drawn for each place of a padded tensor: then it
    depends on the number of ranks.
    """
    ids = torch.full((len(samples), LENGTH), PAD)
    for row, sample in zip(ids, samples, strict=True):
        text = torch.tensor(list(sample["text"].encode()[:LENGTH]))
        row[: len(text)] = text
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def accuracy(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output.logits.argmax(dim=1) == batch["labels"]).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--layout", default="auto", help="such as dp=2,zero=3")
    parser.add_argument("--run-dir", default="runs/text")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()

    size = 64 if options.tiny else 1600
    train, val = make_reviews(size, seed=1), make_reviews(size // 4, seed=2)

    torch.manual_seed(0)
    # Random weights, so that nothing is downloaded. For a pretrained model:
    # DistilBertForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)
    config = DistilBertConfig(
        vocab_size=256,
        max_position_embeddings=LENGTH,
        dim=64,
        hidden_dim=128,
        n_layers=2,
        n_heads=4,
    )
    model = DistilBertForSequenceClassification(config)
    trainer = paceline.Trainer(
        model,  # no loss=: the model returns its own, since the batch has labels
        # Weight decay for weights alone; biases and norms have none.
        optimizer=torch.optim.AdamW(paceline.parameter_groups(model, weight_decay=0.01), lr=1e-3),
        global_batch=32,
        clip_norm=1.0,
        layout=options.layout,
        metrics={"accuracy": accuracy},
        data=paceline.DataOptions(collate_fn=collate),
        checkpoint=paceline.Checkpointing(every_epoch=True, best="accuracy", mode="max"),
        run_dir=options.run_dir,
    )
    epochs = options.epochs // 2 if options.tiny else options.epochs
    history = trainer.fit(train, val, epochs=epochs, resume=options.resume)
    for epoch, value in enumerate(history.metric("accuracy"), 1):
        print(f"epoch {epoch}: accuracy {value:.3f}")

    # Texts of your own need a label to go through collate; predict does not look at it.
    texts = ["the music was wonderful", "the plot was not wonderful", "every joke was not flat"]
    rows = trainer.predict(
        [{"text": text, "label": 0} for text in texts],
        which="best",
        take=lambda output: output.logits.softmax(dim=1)[:, 1],
    )
    for text, kind in zip(texts, rows.tolist(), strict=True):
        print(f"{kind:.3f}  {text}")


if __name__ == "__main__":
    main()
