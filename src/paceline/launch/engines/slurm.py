"""``--on slurm``: a batch job with one launcher on every node.

The script (``slurm_script``) and all that SLURM writes lie in the run's folder, in ``submission/``.
Before the time limit the run saves and leaves, and its job goes back into the queue, where it goes
on; so it does after a lost node. A run that failed stays failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from paceline.config import Config
from paceline.config.slurm_fields import indices_of, seconds_of
from paceline.errors import ConfigError, LaunchError
from paceline.launch.engines.base import INDEX, ClusterJob, LaunchEngine
from paceline.launch.engines.local import newest_log, show_log
from paceline.launch.engines.slurm_commands import JobState, need, run_command, states_of, tell_step
from paceline.launch.engines.slurm_script import SECRET, script_of
from paceline.launch.engines.submission import Submission
from paceline.launch.run_folder import SUBMISSION
from paceline.launch.secret import make_secret
from paceline.untrusted import printable, write_private

SCRIPT = "job.sh"
_JOB = re.compile(r"[0-9]+")
_ASK_SECONDS = 5.0


class SlurmEngine(LaunchEngine):
    """Submits runs to SLURM, and answers for them."""

    def problems(self, config: Config) -> list[str]:
        """What sbatch would take, but not do what was meant."""
        slurm, found = config.launch.slurm, []
        if slurm.gres is not None and slurm.gpus_per_node is not None:
            found.append(
                f"launch.slurm.gres={slurm.gres!r} with gpus_per_node={slurm.gpus_per_node}: give "
                "one or the other"
            )
        if slurm.time is not None and seconds_of(slurm.time) <= slurm.save_before:
            found.append(
                f"launch.slurm.save_before={slurm.save_before}: the run would save and leave as "
                f"soon as it starts, for launch.slurm.time={slurm.time!r} is "
                f"{seconds_of(slurm.time)} s; lower the one or raise the other"
            )
        if slurm.save_before < config.launch.grace:
            found.append(
                f"launch.slurm.save_before={slurm.save_before} is less than the "
                f"{config.launch.grace:g} s that the ranks have to save (launch.grace); raise it"
            )
        if config.launch.rdzv is not None:
            found.append(
                f"launch.rdzv={config.launch.rdzv!r}: with --on slurm the machines meet on the "
                "first node of the job; leave it out"
            )
        return found

    def gpus_per_machine(self, config: Config) -> int:
        """As many as are asked for."""
        slurm = config.launch.slurm
        if slurm.gpus_per_node is not None:
            return slurm.gpus_per_node
        kinds = [part.split(":") for part in (slurm.gres or "").split(",")]  # gpu[:type][:number]
        numbers = [kind[-1] for kind in kinds if kind[0] == "gpu"]
        return sum(int(number) if number.isdecimal() else 1 for number in numbers)

    def index_of_sample(self, config: Config) -> str:
        """The first of the array."""
        array = config.launch.slurm.array
        return "0" if array is None else str(indices_of(array)[0])

    def plan(self, job: ClusterJob) -> str:
        """The script."""
        _check(job)
        return script_of(job)

    def start(self, job: ClusterJob) -> int:
        """Submit the script; where that is refused, nothing is left in the run's folder."""
        _check(job)
        script = script_of(job)
        try:
            need("sbatch")
            file = prepare(job) / SCRIPT
            write_private(file, script.encode("utf-8", "surrogateescape"))
            said = run_command(["sbatch", "--parsable", str(file)]).strip()
            number, _, cluster = said.partition(";")
            if not _JOB.fullmatch(number):
                raise LaunchError(f"sbatch answered {printable(said)!r}, which is no job's number.")
        except (ConfigError, LaunchError, OSError) as error:
            take_back(job)
            if isinstance(error, OSError):
                raise LaunchError(
                    f"{str(job.submission)!r} cannot be written: {error.strerror or error}."
                ) from error
            raise
        details = {"cluster": cluster} if cluster else {}
        details["grace"] = f"{job.config.launch.grace:g}"
        Submission("slurm", number, job.run, details).save()
        _say_submitted(job, number)
        return 0

    def status(self, submission: Submission) -> str:
        """The state of the job, or of the jobs of an array."""
        found = _states(submission)
        if not found:
            return f"job {submission.job} is over, and SLURM has forgotten it"
        return ", ".join(map(str, found))

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """What the job has printed: of an array, the job that wrote last."""
        folder = submission.run / SUBMISSION
        if "step" in submission.details:  # srun printed it where it was typed
            going_on = _Asked(submission) if follow else None
            show_log(newest_log(submission.run, 0), follow=going_on)
            return 0
        while not (files := list(folder.glob(f"slurm-{submission.job}*.out"))):
            if not follow or not _goes_on(submission):
                raise ConfigError(
                    f"{submission.run}: nothing was printed so far: {self.status(submission)}."
                )
            time.sleep(_ASK_SECONDS)
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        show_log(newest, follow=_Asked(submission) if follow else None)
        return 0

    def cancel(self, submission: Submission) -> str:
        """Have the run save and leave, and its job ended."""
        found = [state for state in _states(submission) if not state.is_over]
        if not found:
            raise ConfigError(f"{submission.run}: {self.status(submission)}.")
        if "step" in submission.details:
            if not tell_step(submission.job, submission.details["step"], "TERM"):
                raise ConfigError(f"{submission.run}: the run is over, its job goes on.")
            return f"the run saves and leaves (SIGTERM); job {submission.job} goes on"
        _refuse_other_job(submission, found)
        where = _where(submission)
        running = [state for state in found if state.state == "RUNNING"]
        grace = float(submission.details.get("grace", "15"))
        if running and grace > _kill_wait():
            # SLURM would kill the run before it has saved.
            for state in running:  # the script first: it is not to requeue the job
                for whom in (["--batch"], []):
                    run_command(["scancel", *where, *whom, "--signal=TERM", state.job])
            _wait_until_over(submission, grace)
        run_command(["scancel", *where, submission.job])
        if running:
            return f"job {submission.job} is cancelled: the run saves and leaves (SIGTERM)"
        return f"job {submission.job} is cancelled; it was {found[0].state}"


class _Asked:
    """Whether a job still runs: asked now and then, not at every look at its log."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._next = 0.0
        self._answer = True

    def __call__(self) -> bool:
        if time.monotonic() >= self._next:
            with contextlib.suppress(LaunchError):  # the controller may be back in a moment
                self._answer = _goes_on(self._submission)
            self._next = time.monotonic() + _ASK_SECONDS
        return self._answer


def _check(job: ClusterJob) -> None:
    """What can be known of a job alone, not of its config."""
    array = job.config.launch.slurm.array
    varied = [text for text in (*job.train, *job.script_arguments) if INDEX in text]
    if varied and array is None:
        raise ConfigError(
            f"{varied[0]}: {INDEX} is the number of a run in an array of them; ask for one with "
            "--set launch.slurm.array=0-3"
        )
    if array is not None and job.resume:
        raise ConfigError(
            f"--resume {job.run} with launch.slurm.array: an array goes on with --run-dir "
            f"{job.run} --resume auto"
        )
    if "\\" in str(job.run):
        raise ConfigError(
            f"run folder {str(job.run)!r}: SLURM does not take a \\ in the name of an output file. "
            "Choose another with --run-dir."
        )


def prepare(job: ClusterJob) -> Path:
    """Make the folder of the submission, with a secret for the machines of the run."""
    job.submission.mkdir(parents=True, exist_ok=True)
    if job.nodes[1] > 1 and not (job.submission / SECRET).exists():
        make_secret(job.submission / SECRET)
    return job.submission


def take_back(job: ClusterJob) -> None:
    """Remove what was written for a job that there is not; a run that was there stays."""
    if not (job.run / "config.yaml").exists():
        for name in (SCRIPT, SECRET):
            with contextlib.suppress(OSError):
                (job.submission / name).unlink()
    for folder in (job.submission, job.run):
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if it is empty


def _say_submitted(job: ClusterJob, number: str) -> None:
    from paceline.launch.job import to_stderr

    to_stderr(f"submitted job {number}")
    to_stderr(f"run folder: {job.run}")
    to_stderr(f"  how it is      paceline runs status {job.run}")
    to_stderr(f"  its output     paceline runs logs {job.run} --follow")
    to_stderr(f"  end it         paceline runs cancel {job.run}")


def _where(submission: Submission) -> list[str]:
    cluster = submission.details.get("cluster", "")
    return [f"--clusters={cluster}"] if cluster else []


def _states(submission: Submission) -> list[JobState]:
    if not _JOB.fullmatch(submission.job):
        raise ConfigError(f"{submission.run}: {submission.job!r} is no number of a SLURM job.")
    return states_of(submission.job, submission.details.get("cluster", ""))


def _goes_on(submission: Submission) -> bool:
    return any(not state.is_over for state in _states(submission))


def _refuse_other_job(submission: Submission, found: list[JobState]) -> None:
    """The number is what the run's folder says, which may come from anybody: the job is asked."""
    folder = os.path.realpath(submission.run / SUBMISSION)
    for state in found:
        # SLURM's own text ends a value at a space, where the folder's name may go on.
        output = os.path.realpath(state.details.get("StdOut", os.devnull))
        if not (
            output.startswith(f"{folder}{os.sep}") or (" " in folder and folder.startswith(output))
        ):
            raise ConfigError(
                f"{submission.run}: job {state.job} writes to {output}, so it is not this run's. "
                f"If it is to end: scancel {state.job}"
            )


def _wait_until_over(submission: Submission, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _goes_on(submission):
        time.sleep(1.0)


def _kill_wait() -> float:
    """Seconds between SIGTERM and SIGKILL for a job that is cancelled, as SLURM is set up."""
    with contextlib.suppress(LaunchError):
        found = re.search(r"KillWait\s*=\s*([0-9]+)", run_command(["scontrol", "show", "config"]))
        if found:
            return float(found[1])
    return 30.0
