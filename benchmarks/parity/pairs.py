"""Random sound pairs of a layout and a model: on none of them may the prover raise an alarm."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.layout.pipeline_schedules import SCHEDULES, default_stages_per_rank
from paceline.models import GPT
from paceline.models.gpt import token_cross_entropy
from paceline.testing.models import make_images, make_vectors
from parity.columns import LENGTH, VOCABULARY, Encodings, adamw, convnet, hugging_face, text


@dataclass(frozen=True)
class Pair:
    """A layout, and what ``verify`` needs to prove it."""

    layout: str
    model: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.layout} on {self.model}"


def random_pair(seed: int, *, hugging_face_too: bool = True) -> Pair:
    """Pair number ``seed``: always the same."""
    choose = random.Random(seed)
    dp, tp, pp = _degrees(choose)
    parts = [f"dp={dp}"]
    if dp > 1 and choose.random() < 0.6:
        parts.append(f"zero={choose.randint(1, 3)}")
        if dp == 4 and choose.random() < 0.5:
            parts.append("replicas=2")
    parts += [f"tp={tp}"] if tp > 1 else []
    parts += ["sequence=1"] if tp > 1 and choose.random() < 0.3 else []
    stages = 1
    if pp > 1:
        schedule = choose.choice(SCHEDULES)
        stages = pp * default_stages_per_rank(schedule)
        parts += [f"pp={pp}", f"schedule={schedule}"]
    batch = 2 * choose.randint(max(dp, 3), 8)
    if choose.random() < 0.7:
        parts.append(f"microbatch={choose.randint(1, max(1, batch // dp // 2))}")
    names = ["perceptron", "convnet", "tied GPT", "untied GPT"]
    names += ["GPT-2", "Llama", "Qwen2", "Qwen3", "BERT"] if hugging_face_too else []
    name = choose.choice(names)
    blocks = max(stages, choose.randint(1, 3))
    arguments = _subject(name, blocks, choose, seed)
    arguments |= dict(global_batch=batch, clip_norm=choose.choice([None, 0.1, 10.0]))
    return Pair(",".join(parts), f"{name} of {blocks} blocks", arguments)


def _degrees(choose: random.Random) -> tuple[int, int, int]:
    while True:
        degrees = choose.choice([1, 2, 3, 4]), choose.choice([1, 1, 2, 4]), choose.choice([1, 1, 2])
        if 1 < degrees[0] * degrees[1] * degrees[2] <= 8:
            return degrees


def _subject(name: str, blocks: int, choose: random.Random, seed: int) -> dict[str, Any]:
    kinds = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]
    kind = choose.choice(kinds)
    optimizer = functools.partial(kind, lr=1e-2)
    if name == "perceptron":
        widths = [choose.choice([4, 6, 8, 12, 16]) for _ in range(blocks)]
        bias, norm = choose.random() < 0.8, choose.random() < 0.5
        model: Any = functools.partial(perceptron, widths, bias, norm)
        data: Any = make_vectors(40, inputs=5, outputs=3, seed=seed)
        loss: Any = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
        return dict(model=model, data=data, loss=loss, optimizer=optimizer)
    if name == "convnet":
        data = make_images(40, size=4, seed=seed)
        return dict(
            model=functools.partial(convnet, blocks),
            data=data,
            loss=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            sync_batchnorm=True,
        )
    if name.endswith("GPT"):
        sizes = dict(context=LENGTH, layers=blocks, heads=4, width=choose.choice([16, 24]))
        tied = name.startswith("tied")
        model = functools.partial(GPT, VOCABULARY, dropout=0.1, tied=tied, **sizes)
        return dict(model=model, data=text(), loss=token_cross_entropy, optimizer=optimizer)
    model = functools.partial(hugging_face, name, blocks)
    return dict(model=model, data=Encodings(), optimizer=adamw)


def perceptron(widths: list[int], bias: bool, norm: bool) -> nn.Module:
    """Linear layers of any widths, five inputs, three outputs."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip([5, *widths], [*widths, 3], strict=True):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.GELU()]
        layers += [nn.LayerNorm(outputs)] if norm else []
    return nn.Sequential(*layers[: -2 if norm else -1])
