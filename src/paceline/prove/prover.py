"""The proof: one process first, then every layout beside it, then the reasons."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, LayoutError, PacelineError, RankFailed, TrainingError
from paceline.prove.cases import Case
from paceline.prove.causes import likely_cause
from paceline.prove.comparison import Tolerance, ValueKey
from paceline.prove.devices import ProofDevice
from paceline.prove.evidence import (
    DifferenceEvidence,
    LikelyCause,
    first_to_differ,
    missing_everywhere,
    wrong_in,
)
from paceline.prove.jobs import RankOutcome, Reference, load, run_layout, run_reference
from paceline.prove.report import LayoutResult, VerifyReport, Where
from paceline.prove.row_bias import explains_loss
from paceline.prove.sample_weights import Weights, find_weights
from paceline.prove.subject import Subject
from paceline.testing.pool import RankPool

if TYPE_CHECKING:
    from paceline.prove._planted import Plant

Tell = Callable[[str], None]

PRELOAD = (
    "paceline.prove",
    "paceline.parallel.shard",
    "paceline.parallel.tensor",
    "paceline.parallel.pipeline",
)
"""What the ranks of a proof share one import of."""


class Prover:
    """Runs the cases of one subject on a pool of local ranks."""

    def __init__(
        self,
        subject: Subject,
        *,
        clip_norm: float | None,
        sync_batchnorm: bool,
        plant: Plant | None,
        timeout: float,
        tell: Tell,
        pool: RankPool | None = None,
        place: ProofDevice | None = None,
    ) -> None:
        self.subject = subject
        self.clip_norm, self.sync_batchnorm = clip_norm, sync_batchnorm
        self.plant = plant
        self.timeout = timeout
        self.tell = tell
        self._lent_pool = pool
        self._place = place or ProofDevice()

    def prove(self, cases: Sequence[Case], notes: Sequence[str] = ()) -> VerifyReport:
        """Run everything and report; ranks and files are gone when it returns or raises."""
        started = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder,
            self._ranks() as pool,
            # What the ranks print must not mix with a report on standard output.
            contextlib.redirect_stdout(sys.stderr),
        ):
            self._pool, self._folder = pool, Path(folder)
            self._told: list[str] = []
            self._cut_references: dict[str, tuple[Path, Reference]] = {}
            self.tell("one process")
            self._main = self._folder / "main"
            reference, no_float64 = self._first_reference()
            self._check_plant(reference)
            tolerance = Tolerance(self.subject.precision, reference.noise)
            rows = []
            for number, case in enumerate(cases, 1):
                self.tell(f"{case} ({number} of {len(cases)})")
                rows.append(self._prove_case(case, reference, tolerance))
        return VerifyReport(
            rows=rows,
            steps=self.subject.steps,
            global_batch=max(reference.batch),
            precision=self.subject.precision,
            device=self._place.kind,
            noise=tolerance.noise,
            plant=None if self.plant is None else self.plant.name,
            notes=[
                *notes,
                *no_float64,
                *self._notes(reference, tolerance, cases, rows),
                *self._told,
            ],
            seconds=time.monotonic() - started,
        )

    def _ranks(self) -> contextlib.AbstractContextManager[RankPool]:
        if self._lent_pool is not None:
            return contextlib.nullcontext(self._lent_pool)
        return RankPool(timeout=self.timeout, preload=PRELOAD)

    def _first_reference(self) -> tuple[Reference, list[str]]:
        """The run on one process; in float32 where the model has no float64, and a note of it."""
        try:
            return self._reference(self._main, None), []
        except RankFailed as failure:
            cause = failure.__cause__
            if self.subject.precision != "fp64" or cause is None:
                raise
            words = str(cause).strip().splitlines() or [type(cause).__name__]
            in_double = failure
        double = self.subject
        self.subject = replace(double, precision="fp32", runs_in_float64=False)
        shutil.rmtree(self._main)
        self.tell("one process, in float32")
        try:
            reference = self._reference(self._main, None)
        except (PacelineError, RankFailed):
            self.subject = double
            raise in_double from in_double.__cause__  # it is not float64 that is missing
        note = (
            f"the model does not run in float64 ({words[0]}), so the proof is in float32: what is "
            "allowed is what rounding does to one process"
        )
        return reference, [note]

    def _reference(self, folder: Path, forwards_of: Case | None) -> Reference:
        folder.mkdir()
        try:
            (reference,) = self._pool.run(
                run_reference,
                *(self.subject, folder, forwards_of, forwards_of is None, self._place.kind),
                world_size=1,
                join=False,
                timeout=self.timeout,
            )
        except RankFailed as failure:
            if (own := _own_error(failure)) is failure:
                raise
            raise own from None
        return reference

    def _prove_case(self, case: Case, reference: Reference, tolerance: Tolerance) -> LayoutResult:
        started = time.monotonic()
        row = self._compare_case(case, reference, tolerance)
        return replace(row, seconds=time.monotonic() - started)

    def _compare_case(self, case: Case, reference: Reference, tolerance: Tolerance) -> LayoutResult:
        if (refusal := case.refusal()) is not None:
            return _refused(case, *refusal)
        try:
            folder, reference = self._reference_for(case, reference)
        except (PacelineError, RankFailed) as error:
            words = f"one process cannot run the forwards that the ranks run together: {error}"
            return LayoutResult(str(case), "failed", words=words)
        try:
            outcomes = self._run(self.subject, case, folder)
        except RankFailed as failure:
            raised = _own_error(failure)
            if isinstance(raised, LayoutError | TrainingError):
                # One process ran it, so that it is the layout which cannot.
                return _refused(case, None, str(raised))
            return LayoutResult(str(case), "failed", words=str(raised))
        if case.layout.tp > 1:
            self._told += [f"{case}: {note}" for note in outcomes[0].told]
        row = _compare(case, outcomes, tolerance, reference)
        if row.ok:
            return row
        if reference.facts.layout_free:
            return self._without_draws(case, row, outcomes)
        cause = self._cause(case, folder, outcomes, reference, tolerance)
        return replace(row, cause=cause.name, words=cause.words)

    def _reference_for(self, case: Case, reference: Reference) -> tuple[Path, Reference]:
        """A model whose samples meet in a forward is compared forward by forward."""
        meets = bool(reference.facts.live_norms or reference.changing_buffers)
        if not meets or not any(case.accumulates(samples) for samples in reference.batch):
            return self._main, reference
        key = str([case.forwards(samples) for samples in reference.batch])
        if key not in self._cut_references:
            folder = self._folder / f"cut as {case}"
            found = self._reference(folder, case)
            self._cut_references[key] = folder, replace(found, noise=reference.noise)
        return self._cut_references[key]

    def _run(self, subject: Subject, case: Case, folder: Path) -> list[RankOutcome]:
        plant, floor = self.plant, Tolerance.FLOORS[subject.precision]
        outcomes: list[RankOutcome] = self._pool.run(
            run_layout,
            *(subject, case, folder, plant, floor),
            world_size=case.layout.world_size,
            timeout=self.timeout,
            device=self._place.kind,
            share_gpu=self._place.shares(case.layout.world_size),
        )
        return outcomes

    def _without_draws(
        self, case: Case, row: LayoutResult, outcomes: list[RankOutcome]
    ) -> LayoutResult:
        """Once more with dropout off: what differs then has reasons that can be told apart."""
        self.tell(f"{case}: once more without random numbers")
        quiet = Prover(
            replace(self.subject, randomness="fast"),
            clip_norm=self.clip_norm,
            sync_batchnorm=self.sync_batchnorm,
            plant=self.plant,
            timeout=self.timeout,
            tell=self.tell,
            pool=self._pool,
        )
        (found,) = quiet.prove([case]).rows
        if not found.ok:
            return found
        own = sorted({name for outcome in outcomes for name in outcome.facts.own_stream})
        drawn = f" ({', '.join(own[:3])} draw from each rank's own stream)" if own else ""
        return replace(
            row,
            cause="random-forward",
            words=f"the random numbers of the forward pass differ{drawn}: without dropout and "
            "other draws the layout computes the same. Draw tensors whose first dimension is the "
            "batch, and look for draws that are not torch's",
        )

    def _cause(
        self,
        case: Case,
        folder: Path,
        outcomes: list[RankOutcome],
        reference: Reference,
        tolerance: Tolerance,
    ) -> LikelyCause:
        found = first_to_differ(outcomes, tolerance, reference.facts.order)
        if found is None:
            names = ", ".join(missing_everywhere(outcomes)[:3])
            return LikelyCause("missing-parameter", f"no rank has the parameter {names}")
        place, rank, measure = found
        evidence = DifferenceEvidence(
            case=case,
            samples=reference.batch[place.step - 1],
            clip_norm=self.clip_norm,
            sync_batchnorm=self.sync_batchnorm,
            reference=reference,
            outcomes=outcomes,
            place=place,
            rank=rank,
            measure=measure,
            wrong=wrong_in(outcomes, tolerance, place.step),
        )
        if place.step == 0:  # nothing has been computed yet
            return likely_cause(evidence)
        weights = None
        if evidence.differs("gradient") and not reference.facts.live_norms:
            self.tell(f"{case}: looking for the cause")
            weights = self._weights(case, folder, place.step, outcomes[rank])
        evidence = replace(
            evidence,
            weights=weights,
            right_without_accumulation=self._right_without_accumulation(evidence, tolerance),
            bias_on_every_rank=self._bias_on_every_rank(evidence, folder),
        )
        return likely_cause(evidence)

    def _weights(self, case: Case, folder: Path, step: int, outcome: RankOutcome) -> Weights | None:
        if step not in outcome.sketches:
            return None
        found: Weights | None = self._alone(
            find_weights, self.subject, case, folder, step, outcome.sketches[step]
        )
        return found

    def _bias_on_every_rank(self, evidence: DifferenceEvidence, folder: Path) -> bool:
        """Whether biases that each tensor-parallel rank adds would explain the loss."""
        place, tp = evidence.place, evidence.case.layout.tp
        if tp == 1 or not evidence.differs("loss") or evidence.reference.facts.live_norms:
            return False
        outcome = evidence.outcomes[evidence.rank]
        factor = outcome.measures[ValueKey(place.step, "loss", "")].factor
        loss = factor * float(load(folder, place.step)["loss"][""])
        split = {name: dim for one in evidence.outcomes for name, dim in one.split.items()}
        subject = self.subject
        return bool(self._alone(explains_loss, subject, folder, place.step, split, tp, loss))

    def _alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What one process finds out for the evidence; ``None`` where it cannot."""
        try:
            (found,) = self._pool.run(
                function, *arguments, world_size=1, join=False, timeout=self.timeout
            )
        except RankFailed:
            return None  # a model that cannot run a single sample: go by the rest of the evidence
        return found

    def _right_without_accumulation(
        self, evidence: DifferenceEvidence, tolerance: Tolerance
    ) -> bool | None:
        case, step = evidence.case, evidence.place.step
        if not case.accumulates(evidence.samples) or case.layout.pp > 1:
            return None  # a pipeline always cuts
        subject = replace(self.subject, steps=step)
        try:
            outcomes = self._run(subject, replace(case, microbatch=None), self._main)
        except RankFailed:
            return None  # that fails in its own way: no evidence
        return first_to_differ(outcomes, tolerance, []) is None

    def _check_plant(self, reference: Reference) -> None:
        plant = self.plant
        if plant is None:
            return
        if plant.ties and not reference.facts.ties:
            raise ConfigError(f"plant {plant.name!r} needs a model with tied weights: it has none")
        if plant.buffers and not reference.changing_buffers:
            raise ConfigError(
                f"plant {plant.name!r} needs a model whose buffers change in training: it has none"
            )

    def _notes(
        self,
        reference: Reference,
        tolerance: Tolerance,
        cases: Sequence[Case],
        rows: Sequence[LayoutResult],
    ) -> list[str]:
        notes = []
        facts = reference.facts
        if facts.dropout:
            notes.append(
                "dropout was off in every run: with randomness='fast' each rank draws its own "
                "masks, so no layout can repeat one process's"
            )
        if facts.layout_free:
            notes.append(
                "the forward pass draws random numbers, for dropout or the like, that do not know "
                "the layout: they were on in every run"
            )
        if facts.draws:
            drawn = f" ({', '.join(facts.own_stream[:3])})" if facts.own_stream else ""
            notes.append(
                f"the forward pass draws random numbers from each rank's own stream{drawn}"
            )
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
        if self.subject.precision != "fp64" or 100 * tolerance.noise > tolerance.floor:
            notes.append(
                f"one process differs from itself by up to {tolerance.noise:.1e} when its samples "
                "come in another order and cut: what is allowed was set by that"
            )
        notes += [
            f"{case}: a rank's share is no more than a microbatch: nothing to cut"
            for case, row in zip(cases, rows, strict=True)
            if row.outcome != "refused"
            and case.microbatch
            and not any(map(case.accumulates, reference.batch))
        ]
        if self.plant is not None:
            rows = [row for row in rows if row.outcome != "refused"]
            missed = [row.layout for row in rows if row.ok]
            named = all(row.cause == self.plant.name for row in rows if not row.ok)
            fate = f"NOT caught on {', '.join(missed)}" if missed else "caught on every layout"
            if not named:
                fate += ", but named otherwise"
            elif len(missed) < len(rows):
                fate += " and named"
            notes.append(f"planted {self.plant.name} ({self.plant.words}): {fate}")
        return notes


def _own_error(failure: RankFailed) -> Exception:
    """What a rank raised, where Paceline raised it on purpose: its words need no traceback."""
    cause = failure.__cause__
    return cause if isinstance(cause, PacelineError) else failure


def _refused(case: Case, rule: str | None, reason: str) -> LayoutResult:
    """``rule`` is the name of the rule that refuses; else the reason may end with it."""
    told = re.search(r" \[rule: ([\w-]+)\]$", reason)
    if rule is None and told is not None:
        rule, reason = told[1], reason[: told.start()]
    return LayoutResult(str(case), "refused", cause=rule, words=reason)


def _compare(
    case: Case, outcomes: list[RankOutcome], tolerance: Tolerance, reference: Reference
) -> LayoutResult:
    worst = max(
        (
            (one.difference / tolerance.allowed(place), one.difference, place, rank)
            for rank, outcome in enumerate(outcomes)
            for place, one in outcome.measures.items()
        ),
        key=lambda entry: entry[:2],
    )
    _, difference, place, rank = worst
    first = first_to_differ(outcomes, tolerance, reference.facts.order)
    same = first is None and not missing_everywhere(outcomes)
    return LayoutResult(
        layout=str(case),
        outcome="same" if same else "differs",
        difference=difference,
        allowed=tolerance.allowed(place),
        where=Where.at(place, rank),
        first=None if first is None else Where.at(first[0], first[1]),
        first_difference=0.0 if first is None else first[2].difference,
    )
