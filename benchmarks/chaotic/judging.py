"""Is the disturbed run what the undisturbed one is? And is anything left of either?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chaotic.cluster import Cluster
from chaotic.notes import that_count
from paceline.checkpoint.diff import diff_checkpoints
from paceline.checkpoint.folder import Folder
from paceline.events import StepDone, read


@dataclass(frozen=True)
class Compared:
    """Two runs beside each other."""

    steps: int
    tensors: int
    differing_tensors: int
    differing_losses: int
    largest_loss_difference: float

    @property
    def equal(self) -> bool:
        """To the bit, in every tensor of the last checkpoint and the loss of every step."""
        return self.steps > 0 and not self.differing_tensors and not self.differing_losses


def compare(base: Cluster, other: Cluster) -> Compared:
    """The last checkpoints by tensor, and the losses of the steps that count."""
    a, b = (Folder(one.disk).checkpoints()[-1] for one in (base, other))
    found = diff_checkpoints(a, b)
    x, y = losses(base.run_dir), losses(other.run_dir)
    gaps = [abs(x.get(step, float("inf")) - y.get(step, float("inf"))) for step in {**x, **y}]
    # Infinity less infinity cannot be: each step is in one of the two.
    return Compared(
        steps=min(len(x), len(y)) if a.step == b.step else 0,
        tensors=found.equal_tensors + len(found.tensors),
        differing_tensors=len(found.tensors),
        differing_losses=sum(gap != 0 for gap in gaps),
        largest_loss_difference=max(gaps, default=0.0),
    )


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step, of the last time that it was done."""
    return {event.step: event.loss for event in read(run_dir) if isinstance(event, StepDone)}


def sample_problems(cluster: Cluster, samples: int, epochs: int) -> list[str]:
    """What is wrong with the samples of the steps that count: each once an epoch is right."""
    epoch_of = {e.step: e.epoch for e in read(cluster.run_dir) if isinstance(e, StepDone)}
    seen: dict[int, Counter[int]] = {}
    problems = []
    for step, lines in that_count(cluster.notes.all).items():
        if len(lines) != lines[0].size:
            problems.append(f"step {step}: {len(lines)} of {lines[0].size} ranks have noted it")
        for line in lines:
            seen.setdefault(epoch_of[step], Counter()).update(line.samples)
    for epoch in range(epochs):
        counted = seen.get(epoch, Counter())
        missing = samples - len(counted)
        doubled = [sample for sample, count in counted.items() if count > 1]
        if missing or doubled:
            problems.append(f"epoch {epoch}: {missing} samples missing, {len(doubled)} doubled")
    return problems
