"""The prover of ``paceline verify`` with all layouts of one size in one world."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nccl.worlds import Task, run_all
from paceline.errors import PacelineError, RankFailed
from paceline.prove.cases import Case
from paceline.prove.comparison import Tolerance
from paceline.prove.jobs import RankOutcome, Reference, run_layout
from paceline.prove.prover import Prover
from paceline.prove.report import LayoutResult
from paceline.prove.subject import Subject


class ProverInOneWorld(Prover):
    """As its base, but the runs of all layouts come first, smallest worlds first.

    ``limits`` are the arguments of ``run_all``; ``told`` hears of each layout that has run.
    """

    limits: dict[str, Any]
    told: Callable[[str, float], None]
    all_cases: Sequence[Case]

    def _compare_case(self, case: Case, reference: Reference, tolerance: Tolerance) -> LayoutResult:
        if not hasattr(self, "_found"):
            self._run_everything(reference)
        if str(case) not in self._found and case.refusal() is None:
            return LayoutResult(str(case), "not run", words="the time was up")
        return super()._compare_case(case, reference, tolerance)

    def _run(self, subject: Subject, case: Case, folder: Path) -> list[RankOutcome]:
        found = self._found.pop(str(case), None)
        if found is None:  # a second look, for the cause of a difference
            return super()._run(subject, case, folder)
        if isinstance(found, RankFailed):
            raise found
        return found

    def _run_everything(self, reference: Reference) -> None:
        self._found: dict[str, list[RankOutcome] | RankFailed] = {}
        floor = Tolerance.FLOORS[self.subject.precision]
        tasks = {}
        for case in self.all_cases:
            if case.refusal() is not None:
                continue
            try:
                folder, _ = self._reference_for(case, reference)
            except (PacelineError, RankFailed) as error:
                self._found[str(case)] = RankFailed(str(error), rank=0, exit_code=1)
                continue
            arguments = (self.subject, case, folder, None, floor)
            tasks[str(case)] = Task(case.layout.world_size, run_layout, arguments)

        def done(name: str, found: list[Any] | RankFailed, seconds: float) -> None:
            self._found[name] = found
            self.told(name, seconds)

        with tempfile.TemporaryDirectory(prefix="paceline-nccl-") as files:
            run_all(tasks, self._pool, Path(files), done=done, **self.limits)
