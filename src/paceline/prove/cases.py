"""What is put to the proof: a layout, and the microbatch it accumulates over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.data.slices import share
from paceline.engine.batch import split
from paceline.errors import ConfigError, LayoutError
from paceline.layout import Layout
from paceline.layout.rules import Request, check_rules

Piece = tuple[int, int]
"""A microbatch: the data-parallel rank that runs it, and its number there."""


@dataclass(frozen=True)
class Case:
    """One layout to prove. ``microbatch`` is the most samples a rank runs at once."""

    layout: Layout
    microbatch: int | None = None

    @classmethod
    def parse(cls, text: str | Layout | Case, *, microbatch: int | None = None) -> Case:
        """Read ``"dp=2"`` or ``"dp=2,microbatch=4"``; ``microbatch`` is for one that says none."""
        if isinstance(text, Case):
            return text
        if isinstance(text, Layout):
            return cls(text, microbatch)
        if not isinstance(text, str):
            raise LayoutError(
                f"layout {text!r} must be a string like 'dp=2', not a {type(text).__name__}."
            )
        parts = [part.strip() for part in text.split(",")]
        named = [part for part in parts if part.partition("=")[0].strip() == "microbatch"]
        if len(named) > 1:
            raise LayoutError(f"layout {text!r}: microbatch is given twice.")
        for part in named:
            value = part.partition("=")[2].strip()
            if not value.isdigit() or int(value) < 1:
                raise LayoutError(
                    f"layout {text!r}: {part!r} must be microbatch=<whole number, 1 or more>."
                )
            microbatch = int(value)
        rest = ",".join(part for part in parts if part not in named)
        if rest in ("", "auto"):
            raise LayoutError(
                f"layout {text!r} does not say how many ranks it takes. Write it like 'dp=2'."
            )
        return cls(Layout.parse(rest), microbatch)

    def __str__(self) -> str:
        micro = "" if self.microbatch is None else f",microbatch={self.microbatch}"
        return f"{self.layout}{micro}"

    def pieces(self, samples: int) -> dict[Piece, list[int]]:
        """Which samples of a global batch each microbatch holds; as the loader and engine cut."""
        found: dict[Piece, list[int]] = {}
        for rank in range(self.layout.dp):
            own = torch.arange(*share(samples, rank, self.layout.dp))
            for number, part in enumerate(split(own, self.microbatch)):
                found[rank, number] = part.tolist()
        return found

    def forwards(self, samples: int) -> list[list[int]]:
        """The samples that go through the model at the same time, over all ranks."""
        together: dict[int, list[int]] = {}
        for (_, number), indices in self.pieces(samples).items():
            together.setdefault(number, []).extend(indices)
        return [together[number] for number in sorted(together)]

    def accumulates(self, samples: int) -> bool:
        """Whether some rank cuts its share of a global batch into several microbatches."""
        return len(self.forwards(samples)) > 1


def parse_cases(
    layouts: Sequence[str | Layout | Case], *, microbatch: int | None, global_batch: int
) -> list[Case]:
    """The cases to prove; every problem with any of them in one :class:`ConfigError`."""
    if isinstance(layouts, str | Layout | Case):
        layouts = [layouts]
    if not layouts:
        raise ConfigError("no layout to verify: give at least one, like 'dp=2'")
    cases: list[Case] = []
    problems: list[str] = []
    for text in layouts:
        try:
            case = Case.parse(text, microbatch=microbatch)
            check_rules(Request(case.layout))
        except LayoutError as error:
            problems.append(str(error))
            continue
        problems += _batch_problems(case, global_batch, microbatch)
        if case in cases:
            problems.append(f"layout {str(case)!r} is given twice")
        cases.append(case)
    if problems:
        raise ConfigError(problems)
    return cases


def _batch_problems(case: Case, global_batch: int, default: int | None) -> list[str]:
    dp = case.layout.dp
    if global_batch < dp:
        return [
            f"layout {str(case)!r}: the global batch of {global_batch} must be at least dp={dp}, "
            "or some ranks get no samples"
        ]
    largest = -(-global_batch // dp)
    # The run's own microbatch may be more than a share of a small batch: a note says so.
    if case.microbatch is not None and case.microbatch != default and case.microbatch > largest:
        return [
            f"layout {str(case)!r}: microbatch={case.microbatch} must be at most {largest}, a "
            f"rank's share of the global batch of {global_batch} over dp={dp}"
        ]
    return []
