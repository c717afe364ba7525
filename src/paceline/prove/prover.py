"""The proof: one process first, then every layout beside it, then the reasons."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import ConfigError, PacelineError, RankFailed
from paceline.prove.cases import Case
from paceline.prove.causes import Cause, Evidence, likely_cause
from paceline.prove.jobs import Outcome, Reference, run_layout, run_reference
from paceline.prove.measure import KINDS, Judge, Measure, Place
from paceline.prove.plants import PLANTS, Plant
from paceline.prove.report import Report, Row, Where
from paceline.prove.subject import Subject
from paceline.prove.weights import Weights, find_weights
from paceline.testing.pool import RankPool

Tell = Callable[[str], None]


class Prover:
    """Runs the cases of one subject on a pool of local ranks."""

    def __init__(
        self,
        subject: Subject,
        *,
        clip_norm: float | None,
        sync_batchnorm: bool,
        plant: str | None,
        timeout: float,
        tell: Tell,
        pool: RankPool | None = None,
    ) -> None:
        self.subject = subject
        self.clip_norm, self.sync_batchnorm = clip_norm, sync_batchnorm
        self.plant = plant
        self.timeout = timeout
        self.tell = tell
        self._lent_pool = pool

    def prove(self, cases: Sequence[Case], notes: Sequence[str] = ()) -> Report:
        """Run everything and report; ranks and files are gone when it returns or raises."""
        started = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder,
            self._ranks() as pool,
            # What the ranks print must not mix with a report on standard output.
            contextlib.redirect_stdout(sys.stderr),
        ):
            self._pool, self._folder = pool, Path(folder)
            self.tell("one process")
            self._main = self._folder / "main"
            reference = self._reference(self._main, None)
            self._check_plant(reference)
            judge = Judge(self.subject.precision, reference.noise)
            rows = []
            for number, case in enumerate(cases, 1):
                self.tell(f"{case} ({number} of {len(cases)})")
                rows.append(self._prove_case(case, reference, judge))
        return Report(
            rows=rows,
            steps=self.subject.steps,
            global_batch=max(reference.batch),
            precision=self.subject.precision,
            noise=judge.noise,
            plant=self.plant,
            notes=[*notes, *self._notes(reference, judge, cases, rows)],
            seconds=time.monotonic() - started,
        )

    def _ranks(self) -> contextlib.AbstractContextManager[RankPool]:
        if self._lent_pool is not None:
            return contextlib.nullcontext(self._lent_pool)
        return RankPool(timeout=self.timeout, preload=["paceline.prove"])

    def _reference(self, folder: Path, forwards_of: Case | None) -> Reference:
        folder.mkdir()
        try:
            (reference,) = self._pool.run(
                run_reference,
                *(self.subject, folder, forwards_of, forwards_of is None),
                world_size=1,
                join=False,
                timeout=self.timeout,
            )
        except RankFailed as failure:
            raise _own_error(failure) from None
        return reference

    def _prove_case(self, case: Case, reference: Reference, judge: Judge) -> Row:
        started = time.monotonic()
        try:
            folder, reference = self._reference_for(case, reference)
        except (PacelineError, RankFailed) as error:
            words = f"one process cannot run the forwards that the ranks run together: {error}"
            return Row(str(case), "failed", words=words, seconds=time.monotonic() - started)
        try:
            outcomes = self._run(self.subject, case, folder)
        except RankFailed as failure:
            words = str(_own_error(failure))
            return Row(str(case), "failed", words=words, seconds=time.monotonic() - started)
        row = _compare(case, outcomes, judge, reference)
        if not row.ok:
            cause = self._cause(case, folder, outcomes, reference, judge)
            row = replace(row, cause=cause.name, words=cause.words)
        return replace(row, seconds=time.monotonic() - started)

    def _reference_for(self, case: Case, reference: Reference) -> tuple[Path, Reference]:
        """A model whose samples meet in a forward is compared forward by forward."""
        meets = bool(reference.facts.live_norms or reference.changing_buffers)
        if not meets or not any(case.accumulates(samples) for samples in reference.batch):
            return self._main, reference
        folder = self._folder / str(case)
        if folder.exists():
            return folder, reference
        found = self._reference(folder, case)
        return folder, replace(found, noise=reference.noise)

    def _run(self, subject: Subject, case: Case, folder: Path) -> list[Outcome]:
        plant, floor = self.plant, Judge.FLOORS[subject.precision]
        outcomes: list[Outcome] = self._pool.run(
            run_layout,
            *(subject, case, folder, plant, floor),
            world_size=case.layout.world_size,
            timeout=self.timeout,
        )
        return outcomes

    def _cause(
        self,
        case: Case,
        folder: Path,
        outcomes: list[Outcome],
        reference: Reference,
        judge: Judge,
    ) -> Cause:
        found = _first(outcomes, judge, reference.facts.order)
        if found is None:
            names = ", ".join(_missing(outcomes)[:3])
            return Cause("missing-parameter", f"no rank has the parameter {names}")
        place, rank, measure = found
        offenders = {
            other.kind
            for outcome in outcomes
            for other, one in outcome.measures.items()
            if other.step == place.step and one.difference > judge.allowed(other)
        }
        evidence = Evidence(
            case=case,
            samples=reference.batch[place.step - 1],
            clip_norm=self.clip_norm,
            sync_batchnorm=self.sync_batchnorm,
            reference=reference,
            outcomes=outcomes,
            place=place,
            rank=rank,
            measure=measure,
            loss_differs="loss" in offenders,
            gradients_differ="gradient" in offenders,
            norm_differs="norm" in offenders,
            samples_differ=outcomes[rank].samples != reference.batch,
            ranks_differ=_ranks_differ(outcomes, place.step),
        )
        if "gradient" not in offenders or reference.facts.live_norms:
            weights = None
        else:
            self.tell(f"{case}: looking for the cause")
            weights = self._weights(case, folder, place.step, outcomes[rank])
        evidence = replace(
            evidence,
            weights=weights,
            right_without_accumulation=self._right_without_accumulation(evidence, judge),
        )
        return likely_cause(evidence)

    def _weights(self, case: Case, folder: Path, step: int, outcome: Outcome) -> Weights | None:
        if step not in outcome.sketches:
            return None
        try:
            (weights,) = self._pool.run(
                find_weights,
                *(self.subject, case, folder, step, outcome.sketches[step]),
                world_size=1,
                join=False,
                timeout=self.timeout,
            )
        except RankFailed:
            return None  # a model that cannot run a single sample: go by the rest of the evidence
        return weights

    def _right_without_accumulation(self, evidence: Evidence, judge: Judge) -> bool | None:
        case, step = evidence.case, evidence.place.step
        if not case.accumulates(evidence.samples):
            return None
        subject = replace(self.subject, steps=step)
        try:
            outcomes = self._run(subject, replace(case, microbatch=None), self._main)
        except RankFailed:
            return None  # that fails in its own way: no evidence
        return _first(outcomes, judge, []) is None

    def _check_plant(self, reference: Reference) -> None:
        plant = None if self.plant is None else PLANTS[self.plant]
        if plant is None:
            return
        if plant.ties and not reference.facts.ties:
            raise ConfigError(f"plant {plant.name!r} needs a model with tied weights: it has none")
        if plant.buffers and not reference.changing_buffers:
            raise ConfigError(
                f"plant {plant.name!r} needs a model whose buffers change in training: it has none"
            )

    def _notes(
        self, reference: Reference, judge: Judge, cases: Sequence[Case], rows: Sequence[Row]
    ) -> list[str]:
        notes = []
        facts = reference.facts
        if facts.dropout:
            notes.append(
                "dropout was off in every run: each rank draws its own masks, so no layout can "
                "repeat one process's"
            )
        if facts.draws:
            notes.append("the forward pass draws random numbers that are not dropout's")
        if reference.uncut is not None:
            notes.append(
                "one process could not run with its samples in another order and cut, to tell "
                f"rounding by: {reference.uncut}"
            )
        if reference.unsettled:
            some = ", ".join(list(reference.unsettled)[:3])
            notes.append(
                f"{sum(reference.unsettled.values())} elements of {some} have a gradient of "
                "nothing but rounding: what the optimizer makes of it is not compared"
            )
        if self.subject.precision != "fp64" or 100 * judge.noise > judge.floor:
            notes.append(
                f"one process differs from itself by up to {judge.noise:.1e} when its samples come "
                "in another order and cut: what is allowed was set by that"
            )
        notes += [
            f"{case}: a rank's share is no more than a microbatch: nothing to cut"
            for case in cases
            if case.microbatch and not any(map(case.accumulates, reference.batch))
        ]
        if self.plant is not None:
            missed = [row.layout for row in rows if row.ok]
            named = all(row.cause == self.plant for row in rows if not row.ok)
            fate = f"NOT caught on {', '.join(missed)}" if missed else "caught on every layout"
            if not named:
                fate += ", but named otherwise"
            elif len(missed) < len(rows):
                fate += " and named"
            notes.append(f"planted {self.plant} ({PLANTS[self.plant].words}): {fate}")
        return notes


def plant_problems(
    plant: Plant, cases: Sequence[Case], *, clip_norm: float | None, global_batch: int
) -> list[str]:
    """Why ``plant`` could not show on some of the cases."""
    problems = []
    if plant.clipping and clip_norm is None:
        problems.append(f"plant {plant.name!r} needs clipping: set clip_norm (train.clip_norm)")
    for case in cases:
        if case.layout.dp < plant.ranks:
            problems.append(
                f"plant {plant.name!r} needs {plant.ranks} data-parallel ranks or more, but layout "
                f"{str(case)!r} has {case.layout.dp}"
            )
        if plant.accumulation and not case.accumulates(global_batch):
            problems.append(
                f"plant {plant.name!r} needs accumulation, but layout {str(case)!r} runs each "
                f"rank's share of {global_batch} samples at once; add a microbatch, like "
                f"'{case.layout},microbatch=1'"
            )
    return problems


def _own_error(failure: RankFailed) -> Exception:
    """What a rank raised, where Paceline raised it on purpose: its words need no traceback."""
    cause = failure.__cause__
    return cause if isinstance(cause, PacelineError) else failure


def _compare(case: Case, outcomes: list[Outcome], judge: Judge, reference: Reference) -> Row:
    worst = max(
        (
            (one.difference / judge.allowed(place), one.difference, place, rank)
            for rank, outcome in enumerate(outcomes)
            for place, one in outcome.measures.items()
        ),
        key=lambda entry: entry[:2],
    )
    _, difference, place, rank = worst
    first = _first(outcomes, judge, reference.facts.order)
    same = first is None and not _missing(outcomes)
    return Row(
        layout=str(case),
        verdict="same" if same else "differs",
        difference=difference,
        allowed=judge.allowed(place),
        where=Where.at(place, rank),
        first=None if first is None else Where.at(first[0], first[1]),
        first_difference=0.0 if first is None else first[2].difference,
    )


def _first(
    outcomes: list[Outcome], judge: Judge, order: list[str]
) -> tuple[Place, int, Measure] | None:
    """The first value that differs: by step, by kind, then as the modules ran.

    Loss and norm are numbers made of all tensors: they come first only where no tensor differs.
    """
    ran = {name: index for index, name in enumerate(order)}

    def when(found: tuple[Place, int, Measure]) -> tuple[int, bool, int, int, int]:
        place, rank, _ = found
        module = ran.get(place.name.rpartition(".")[0], len(ran))
        return place.step, place.name == "", KINDS.index(place.kind), module, rank

    offenders = [
        (place, rank, one)
        for rank, outcome in enumerate(outcomes)
        for place, one in outcome.measures.items()
        if one.difference > judge.allowed(place)
    ]
    return min(offenders, key=when, default=None)


def _missing(outcomes: list[Outcome]) -> list[str]:
    """Parameters of the reference that no rank has."""
    absent = set(outcomes[0].missing).intersection(*(outcome.missing for outcome in outcomes))
    return sorted(absent)


def _ranks_differ(outcomes: list[Outcome], step: int) -> bool:
    sketches = [outcome.sketches.get(step) for outcome in outcomes]
    if all(one is None for one in sketches):
        return False
    first = sketches[0]
    for other in sketches[1:]:
        if first is None or other is None or first.shape != other.shape:
            return True
        if float((first - other).norm()) > 1e-6 * float(first.norm()):
            return True
    return False
