"""Go on with a text: `python generate.py runs/lm "def "`."""

import argparse

import torch
import yaml

import paceline
from paceline.models import GPT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--which", default="best", help="best, last or a step")
    options = parser.parse_args()

    with open(f"{options.run}/config.yaml") as file:  # the run knows its model
        model = GPT(**yaml.safe_load(file)["model"]["args"])
    # Whatever layout it was trained on, one process can load it.
    paceline.load_weights(model, options.run, which=options.which)
    model.eval()

    torch.manual_seed(0)
    tokens = list(options.text.encode())
    with torch.no_grad():
        for _ in range(options.tokens):
            seen = torch.tensor([tokens[-model.context :]])
            logits = model(seen)[0, -1] / options.temperature
            tokens.append(int(torch.multinomial(logits.softmax(dim=0), 1)))
            if tokens[-1] == 0:  # the end of the document
                break
    print(bytes(tokens).decode(errors="replace"))


if __name__ == "__main__":
    main()
