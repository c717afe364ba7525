"""What is put to the proof: a layout, its microbatch, and how its axes are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.data.batch_shares import share
from paceline.engine.batch import split, split_into
from paceline.errors import ConfigError, LayoutError, TrainingError
from paceline.layout import Layout
from paceline.options import EngineOptions, Pipelining, TensorParallel
from paceline.options.rules import Combination, problem_with

Piece = tuple[int, int]
"""A microbatch: the data-parallel rank that runs it, and its number there."""

_KNOBS = ("microbatch", "schedule", "stages", "sequence")


@dataclass(frozen=True)
class Case:
    """One layout to prove.

    ``microbatch`` is the most samples a rank runs at once. ``schedule`` and ``stages`` (a rank) are
    those of the pipeline, ``sequence`` is tensor parallelism's; left out, what the run says holds,
    of which ``pipeline`` is the pipeline's part.
    """

    layout: Layout
    microbatch: int | None = None
    schedule: str | None = None
    stages: int | None = None
    sequence: bool | None = None
    pipeline: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.layout.pp == 1 and (self.schedule is not None or self.stages is not None):
            knob = "schedule" if self.schedule is not None else "stages"
            raise LayoutError(
                f"layout {str(self)!r}: {knob} is that of a pipeline, but pp=1. Add pp=2 or more, "
                f"or leave {knob} out."
            )
        if self.layout.tp == 1 and self.sequence is not None:
            raise LayoutError(
                f"layout {str(self)!r}: sequence is for tensor parallelism, but tp=1. Add tp=2 or "
                "more, or leave sequence out."
            )
        if self.layout.pp > 1:
            self.pipelining()  # refuses a schedule that there is not

    @classmethod
    def parse(
        cls, text: str | Layout | Case, *, microbatch: int | None = None, pipeline: Any = None
    ) -> Case:
        """Read ``"dp=2,microbatch=4"`` or ``"pp=2,schedule=zbv"``; the rest is as the run has it.

        ``microbatch`` and ``pipeline`` are for a text that says none.
        """
        if isinstance(text, Case):
            return replace(text, pipeline=pipeline)
        if isinstance(text, Layout):
            return cls(text, microbatch, pipeline=pipeline)
        if not isinstance(text, str):
            raise LayoutError(
                f"layout {text!r} must be a string like 'dp=2', not a {type(text).__name__}."
            )
        parts = [part.strip() for part in text.split(",")]
        named = [part for part in parts if part.partition("=")[0].strip() in _KNOBS]
        knobs: dict[str, Any] = {"microbatch": microbatch}
        seen = set()
        for part in named:
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name in seen:
                raise LayoutError(f"layout {text!r}: {name} is given twice.")
            seen.add(name)
            knobs[name] = _knob(text, part, name, value)
        rest = ",".join(part for part in parts if part not in named)
        if rest in ("", "auto"):
            raise LayoutError(
                f"layout {text!r} does not say how many ranks it takes. Write it like 'dp=2'."
            )
        return cls(Layout.parse(rest), **knobs, pipeline=pipeline)

    def __str__(self) -> str:
        told = {
            "schedule": self.schedule,
            "stages": self.stages,
            "sequence": None if self.sequence is None else int(self.sequence),
            "microbatch": self.microbatch,
        }
        return str(self.layout) + "".join(f",{k}={v}" for k, v in told.items() if v is not None)

    def pipelining(self) -> Pipelining:
        """How the pipeline of this case is cut and run."""
        told = {"schedule": self.schedule, "stages_per_rank": self.stages}
        base = Pipelining() if self.pipeline is None else self.pipeline
        return replace(base, **{name: value for name, value in told.items() if value is not None})

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The engine's options for this case, from those of the run."""
        told = {**options, "layout": self.layout, "microbatch": self.microbatch}
        if self.layout.pp > 1:
            told["pipeline"] = self.pipelining()
        if self.sequence is not None:
            base = options.get("tensor") or TensorParallel()
            told["tensor"] = replace(base, sequence=self.sequence)
        return told

    def refusal(self) -> tuple[str, str] | None:
        """The name of the rule that refuses this layout, and its reason."""
        pipeline = self.pipelining() if self.layout.pp > 1 else None
        return problem_with(Combination(self.layout, EngineOptions.of(pipeline=pipeline)))

    def pieces(self, samples: int) -> dict[Piece, list[int]]:
        """Which samples of a global batch each microbatch holds; as the loader and engine cut."""
        found: dict[Piece, list[int]] = {}
        for rank in range(self.layout.dp):
            own = torch.arange(*share(samples, rank, self.layout.dp))
            for number, part in enumerate(self._cut(own)):
                found[rank, number] = part.tolist()
        return found

    def _cut(self, own: torch.Tensor) -> list[torch.Tensor]:
        cut = split(own, self.microbatch)
        if self.layout.pp == 1 or not len(own):
            return cut
        wanted = self.pipelining().microbatches_for(self.layout.pp, len(cut))
        return split_into(own, min(wanted, len(own)))

    def microbatches(self, samples: int) -> list[int]:
        """How many microbatches each data-parallel rank runs, those without samples included."""
        found = [0] * self.layout.dp
        for rank, _ in self.pieces(samples):
            found[rank] += 1
        if self.layout.zero:  # they gather parameters together
            found = [max(found)] * self.layout.dp
        if self.layout.pp == 1:
            return found
        return [self.pipelining().microbatches_for(self.layout.pp, number) for number in found]

    def forwards(self, samples: int) -> list[list[int]]:
        """The samples that go through the model at the same time, over all ranks."""
        together: dict[int, list[int]] = {}
        for (_, number), indices in self.pieces(samples).items():
            together.setdefault(number, []).extend(indices)
        return [together[number] for number in sorted(together)]

    def accumulates(self, samples: int) -> bool:
        """Whether some rank cuts its share of a global batch into several microbatches."""
        return len(self.forwards(samples)) > 1

    def data_rank(self, rank: int) -> int:
        """Which share of the data ``rank`` of the world reads."""
        return self.layout.coordinate(rank).dp


def _knob(text: str, part: str, name: str, value: str) -> Any:
    if name == "schedule":
        return value
    if name == "sequence":
        if value not in ("0", "1"):
            raise LayoutError(f"layout {text!r}: {part!r} must be sequence=0 or sequence=1.")
        return value == "1"
    if not value.isdigit() or int(value) < 1:
        raise LayoutError(f"layout {text!r}: {part!r} must be {name}=<whole number, 1 or more>.")
    return int(value)


def parse_cases(
    layouts: Sequence[str | Layout | Case],
    *,
    microbatch: int | None,
    global_batch: int,
    pipeline: Any = None,
) -> list[Case]:
    """The cases to prove; every mistake in any of them in one ``ConfigError``.

    A layout that is written right but breaks a rule is no mistake here: the report says so.
    """
    if isinstance(layouts, str | Layout | Case):
        layouts = [layouts]
    if not isinstance(layouts, Sequence):
        raise ConfigError(f"layouts={layouts!r} must be a list of layouts, like ['dp=2', 'tp=2']")
    if not layouts:
        raise ConfigError("no layout to verify: give at least one, like 'dp=2'")
    cases: list[Case] = []
    problems: list[str] = []
    for text in layouts:
        try:
            case = Case.parse(text, microbatch=microbatch, pipeline=pipeline)
        except (LayoutError, TrainingError) as error:
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
