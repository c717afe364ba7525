"""``--on ray``: Ray Train places the ranks, one in each of its workers."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import Config, dump, resolve, with_code
from paceline.config.fields import node_range
from paceline.config.resolving import nproc_of
from paceline.errors import ConfigError, LaunchError, RankFailed
from paceline.launch.engines.base import ClusterJob, LaunchEngine
from paceline.launch.engines.local import LocalRuns, newest_log, show_log
from paceline.launch.engines.ray_orders import RankOrders
from paceline.launch.engines.submission import Submission
from paceline.launch.job import to_stderr, to_stdout
from paceline.launch.logs import Relay
from paceline.launch.run_folder import RunFolder, holder_of
from paceline.launch.signals import LauncherSignals, stopping
from paceline.layout.fitting import fit

_POLL_SECONDS = 0.2
_PATIENCE = 30.0
"""Seconds after which it is said that Ray has not placed the workers yet."""
_OWN = ("CPU", "GPU", "TPU", "memory", "object_store_memory")
"""Resources with a meaning of their own for Ray."""


class RayEngine(LaunchEngine):
    """Hands a run to Ray Train, and follows it to its end."""

    def problems(self, config: Config) -> list[str]:
        """What Ray Train cannot do, or this machine."""
        found = [*_of_section(config), *_of_elastic(config)]
        if importlib.util.find_spec("ray") is None:
            found.append("launch.on=ray: Ray is not installed; pip install 'paceline[ray]'")
        if config.launch.share_gpu:
            found.append("launch.share_gpu=true: with Ray each rank has a GPU of its own")
        return found

    def gpus_per_machine(self, config: Config) -> int:
        """Those that ``launch.nproc`` asks for; Ray looks for nodes that have them."""
        nproc = config.launch.nproc
        return nproc if isinstance(nproc, int) and config.launch.device == "cuda" else 0

    def plan(self, job: ClusterJob) -> str:
        """The trainer that would be made, as text."""
        from paceline.launch.engines.ray_trainer import needs_of_worker

        config = _resolved(job.config)
        use_gpu = config.launch.device == "cuda"
        gpus = "if the cluster has any" if config.launch.device == "auto" else use_gpu
        least, most = _workers(config)
        settings = config.launch.ray
        lines = [
            f"address              {settings.address or 'a Ray on this machine, for this run'}",
            f"num_workers          {most if least == most else (least, most)}",
            f"resources_per_worker {needs_of_worker(config, use_gpu=use_gpu)}",
            f"use_gpu              {gpus}",
            f"placement_strategy   {settings.placement}",
            f"max_failures         {_restarts(job)}",
            f"storage_path         {settings.storage_path or job.run.parent}",
            f"run folder           {job.run}",
        ]
        return "\n".join(lines)

    def start(self, job: ClusterJob) -> int:
        """Run it to its end, and leave nothing behind."""
        config = _resolved(job.config)
        run = RunFolder(job.run)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.in_use())
            settings = _save_config(job, run, config)
            address = stack.enter_context(_connected(config))
            identity = uuid.uuid4().hex
            run.mark(identity)
            stack.callback(run.unmark, identity)
            orders = RankOrders(
                run=str(job.run),
                folder=str(job.folder),
                identity=identity,
                resume=job.resume,
                settings=settings,
                script=_script(job),
                arguments=job.script_arguments,
                backend=_backend(job),
                shipped=config.launch.ray.working_dir is not None,
                copies=config.launch.ray.storage_path is not None,
                control=f"paceline:{job.run}",
            )
            Submission("ray", str(orders.control), job.run, {"address": address}).save()
            with job.shown(config):
                _Following(config, run, orders, _restarts(job)).to_the_end()
        return 0

    def status(self, submission: Submission) -> str:
        """What the process that follows the run, or else the cluster, knows of it."""
        pid = holder_of(submission.run)
        if pid is not None:
            return f"process {pid} follows it"
        with _control_of(submission) as control:
            return "no such run in the cluster" if control is None else "running"

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """What rank 0 has written since the run was last started."""
        alive = (lambda: holder_of(submission.run) is not None) if follow else None
        show_log(newest_log(submission.run, 0), follow=alive)
        return 0

    def cancel(self, submission: Submission) -> str:
        """Have the run save and leave, by the process that follows it or by the cluster."""
        if holder_of(submission.run) is not None:
            return LocalRuns().cancel(submission)
        import ray

        with _control_of(submission) as control:
            if control is None:
                raise ConfigError(f"{submission.run}: no such run in the cluster.")
            ray.get(control.leave.remote())
            return "the ranks were told to save and leave"


def _of_section(config: Config) -> list[str]:
    settings, found = config.launch.ray, []
    for name, amount in settings.resources.items():
        if name in _OWN or not name.strip() or not name.isprintable():
            found.append(
                f"launch.ray.resources: {name!r} is no name of a resource of the cluster's own; "
                "CPUs are launch.ray.cpus_per_worker, GPUs launch.device=cuda"
            )
        elif not (math.isfinite(amount) and amount > 0):
            found.append(f"launch.ray.resources.{name}={amount}: must be a number above 0")
    for key, text in (("address", settings.address), ("storage_path", settings.storage_path)):
        if text is not None and not text.isprintable():
            found.append(f"launch.ray.{key}={text!r}: has characters that no address has")
    folder = settings.working_dir
    if folder is not None and "://" not in folder and not os.path.isdir(folder):
        found.append(f"launch.ray.working_dir={folder!r}: there is no such folder")
    if config.launch.rdzv is not None:
        found.append(f"launch.rdzv={config.launch.rdzv}: Ray knows its nodes; leave it out")
    return found


def _of_elastic(config: Config) -> list[str]:
    """Ray Train may give any number of workers from the least to the most."""
    least, most = node_range(config.launch.nnodes)
    if least == most:
        return []
    if config.launch.shrink == "wait":
        return [
            f"launch.nnodes={config.launch.nnodes} with launch.shrink=wait: on Ray, name the one "
            "number of machines to wait for"
        ]
    nproc = nproc_of(config, 0)
    for ranks in range(least * nproc, most * nproc + 1):
        layout = fit(config.layout, ranks)
        if layout is None or layout.world_size != ranks:
            return [
                f"launch.nnodes={config.launch.nnodes}: Ray may give any number of ranks from "
                f"{least * nproc} to {most * nproc}, and layout {config.layout!r} has no place for "
                f"{ranks}. Name one number of machines"
            ]
    return []


def _resolved(config: Config) -> Config:
    return with_code(resolve(config, devices=0))


def _workers(config: Config) -> tuple[int, int]:
    nproc = nproc_of(config, 0)
    least, most = node_range(config.launch.nnodes)
    return least * nproc, most * nproc


def _script(job: ClusterJob) -> str | None:
    return job.train[1] if job.train[:1] == ("--script",) else None


def _backend(job: ClusterJob) -> str | None:
    return job.train[3] if job.train[2:3] == ("--backend",) else None


def _restarts(job: ClusterJob) -> int:
    """A script may not be made to run twice: its restarts, unlike a config's, must be asked for."""
    asked = any(word.startswith("launch.max_restarts=") for word in job.train)
    if _script(job) is not None and not asked:
        return 0
    return job.config.launch.max_restarts


def _save_config(job: ClusterJob, run: RunFolder, config: Config) -> str | None:
    """Write the config of a new run; of one that goes on, the file of its other settings."""
    if _script(job) is not None:
        return None
    text = dump(config)
    if not run.config.exists():
        run.save_config(text)
    if run.has_config(text):
        return None
    settings = job.submission / "settings.yaml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(text, encoding="utf-8")
    return str(settings)


@contextlib.contextmanager
def _connected(config: Config) -> Iterator[str]:
    """A connection to the cluster, or a Ray for this run alone; the address for others."""
    import ray

    if ray.is_initialized():
        raise LaunchError("this process is connected to a Ray already: ray.shutdown() first.")
    address = config.launch.ray.address
    options: dict[str, Any] = {
        "namespace": RankOrders.NAMESPACE,
        "log_to_driver": False,
        "logging_level": "warning",
    }
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        needed = math.ceil(_workers(config)[1] * config.launch.ray.cpus_per_worker)
        resources = {
            name: amount * _workers(config)[1]
            for name, amount in config.launch.ray.resources.items()
        }
        options |= {"num_cpus": needed, "resources": resources, "include_dashboard": False}
    try:
        ray.init(address=address or "local", **options)
    except Exception as error:
        shown = address or "a Ray on this machine"
        raise LaunchError(
            f"launch.ray.address: {shown} cannot be used: {error}. Name a cluster that runs, with "
            "the same versions of Ray and Python as here."
        ) from error
    try:
        yield address or str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _control_of(submission: Submission) -> Iterator[Any]:
    """The actor by which a run is controlled; ``None`` where the cluster has none."""
    import ray

    found = None
    try:
        ray.init(
            address=submission.details["address"],
            namespace=RankOrders.NAMESPACE,
            log_to_driver=False,
            logging_level="error",
        )
        with contextlib.suppress(ValueError):
            found = ray.get_actor(submission.job)
    except Exception:  # the cluster is gone
        found = None
    try:
        yield found
    finally:
        ray.shutdown()


class _Following:
    """A run in the cluster, followed by this process."""

    def __init__(self, config: Config, run: RunFolder, orders: RankOrders, restarts: int) -> None:
        self._config, self._run = config, run
        self._orders, self._restarts = orders, restarts
        self._relay = Relay(to_stdout)
        self._log: Path | None = None
        self._before = set(run.logs.glob("**/rank0.log"))

    def to_the_end(self) -> None:
        """Start the run, show what rank 0 writes, and raise what came of it."""
        import ray

        from paceline.launch.engines.ray_control import RunInCluster

        use_gpu = self._use_gpu()
        self._check_capacity(use_gpu)
        actor = ray.remote(num_cpus=0, max_concurrency=8)(RunInCluster)
        named = actor.options(name=self._orders.control, namespace=RankOrders.NAMESPACE)
        control = named.remote(self._config, self._orders, use_gpu, self._restarts)
        done = control.fit.remote()
        try:
            with LauncherSignals() as signals:
                outcome = self._wait(control, done, signals)
        finally:
            self._relay.finish()
            ray.kill(control)
        if signals.first is not None:
            raise signals.as_error()
        if outcome["error"]:
            raise RankFailed(
                outcome["error"],
                rank=outcome["rank"],
                exit_code=1,
                traceback=outcome["traceback"],
            )

    def _wait(self, control: Any, done: Any, signals: LauncherSignals) -> dict[str, Any]:
        import ray

        begun, told, asked_at = time.monotonic(), False, None
        while not ray.wait([done], timeout=_POLL_SECONDS)[0]:
            self._show_newest()
            now = time.monotonic()
            if signals.first is not None and asked_at is None:
                asked_at = now
                control.leave.remote()
                to_stderr(stopping(signals.first, self._config.launch.grace))
            late = asked_at is not None and now > asked_at + self._config.launch.grace
            if signals.insisted or late:
                raise signals.as_error()
            if not told and self._log is None and now > begun + _PATIENCE:
                told = True
                to_stderr(f"Ray has not placed the ranks yet; it has free: {_shown_free()}")
        self._show_newest()
        try:
            return dict(ray.get(done))
        except ray.exceptions.RayError as error:
            raise LaunchError(f"the run's actor in the Ray cluster is gone: {error}") from error

    def _show_newest(self) -> None:
        """Pass on the log of the newest start of rank 0."""
        logs = set(self._run.logs.glob("**/rank0.log")) - self._before
        newest = max(logs, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is not None and newest != self._log:
            self._log = newest
            self._relay.follow(newest, newest.with_suffix(".quiet"))

    def _use_gpu(self) -> bool:
        import ray

        device = self._config.launch.device
        return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)

    def _check_capacity(self, use_gpu: bool) -> None:
        """Refuse what a cluster that does not grow could never place."""
        import ray

        from paceline.launch.engines.ray_trainer import needs_of_worker

        has = ray.cluster_resources()
        least = _workers(self._config)[0]
        short = [
            f"{least} ranks need {amount * least:g} {name}, the cluster has {has.get(name, 0):g}"
            for name, amount in needs_of_worker(self._config, use_gpu=use_gpu).items()
            if amount * least > has.get(name, 0)
        ]
        if short:
            to_stderr(
                "; ".join(short) + ". Ray waits for nodes that have it; Ctrl-C ends the waiting."
            )


def _shown_free() -> str:
    import ray

    free = {name: n for name, n in ray.available_resources().items() if ":" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(free.items())) or "nothing"
