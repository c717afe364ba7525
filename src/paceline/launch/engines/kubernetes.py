"""``--on kubernetes``: a manifest for every run, handed to ``kubectl`` when asked to.

The run's folder here keeps the manifest and the record of what was handed over; the run itself is
in a folder of the same name on the volume that the pods share.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

from paceline.config import Config, dump
from paceline.config.launch_kubernetes import LONGEST_NAME, Kubernetes
from paceline.errors import ConfigError, LaunchError
from paceline.launch.engines.base import ClusterJob, LaunchEngine
from paceline.launch.engines.kubernetes_manifest import (
    container_name,
    documents,
    most_pods,
    rendezvous_host,
    resource,
    write,
)
from paceline.launch.engines.kubernetes_pods import CONFIG_FOLDER, SECRET_KEY, PodPlan
from paceline.launch.engines.submission import Submission
from paceline.untrusted import parse_json, printable, write_private

MANIFEST = "manifest.yaml"
RUN_LABEL = "paceline/run"
_CONFIG_FILE = "config.yaml"
_ANSWER_SECONDS = 60.0


class KubernetesEngine(LaunchEngine):
    """Runs as Jobs, JobSets, TrainJobs or PyTorchJobs."""

    def problems(self, config: Config) -> list[str]:
        """What a pod would lack."""
        settings = config.launch.kubernetes
        found = []
        if settings.image is None:
            found.append(
                "launch.kubernetes.image is not set: pods need an image with Paceline and your "
                "code. Build one with docker/Dockerfile, push it, and name it: "
                "--set launch.kubernetes.image=REGISTRY/NAME:TAG"
            )
        if settings.claim is None:
            found.append(
                "launch.kubernetes.claim is not set: the disk of a pod is lost with it, and a run "
                "without its folder cannot go on, even with its checkpoints elsewhere. Name a "
                "PersistentVolumeClaim that all pods can mount (ReadWriteMany): "
                "--set launch.kubernetes.claim=NAME"
            )
        if config.launch.secret is not None and settings.secret is None:
            found.append(
                f"launch.secret={config.launch.secret} is on this machine, where no pod sees it. "
                f"Make a Secret of it and name that: {_make_secret('NAME', settings)}; then "
                "--set launch.kubernetes.secret=NAME"
            )
        if config.launch.rdzv is not None:
            found.append(
                f"launch.rdzv={config.launch.rdzv}: pods meet at pod 0, at "
                "launch.kubernetes.port; leave launch.rdzv out"
            )
        if settings.kind == "trainjob" and settings.keep is not None:
            found.append(
                f"launch.kubernetes.keep={settings.keep}: a TrainJob is kept until it is deleted; "
                "leave keep out, or use kind: jobset"
            )
        return found

    def gpus_per_machine(self, config: Config) -> int:
        """What every pod asks for."""
        return config.launch.kubernetes.gpus or 0

    def plan(self, job: ClusterJob) -> str:
        """The manifest, with what to do first as comments."""
        name = cluster_name(job)
        notes = [f"# {line}" for line in _first(job, name)]
        return "\n".join([*notes, manifest(job)])

    def start(self, job: ClusterJob) -> int:
        """Write the manifest; hand it to kubectl with ``--apply``, else print the command."""
        settings, name = job.config.launch.kubernetes, cluster_name(job)
        text = manifest(job)
        kubectl = Kubectl.of(settings)
        if job.apply:
            kubectl.check()
        file = job.submission / MANIFEST
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, text.encode())
        details = kubectl.details() | {
            "kind": settings.kind,
            "pods": str(most_pods(job.config)),
            "folder": str(_folder(settings, name)),
        }
        Submission("kubernetes", name, job.run, details).save()
        print(f"manifest: {printable(file)}")
        for line in _first(job, name):
            print(printable(line))
        if not job.apply:
            print(f"to start it: {printable(kubectl.shown('apply', '-f', str(file)))}")
            return 0
        answer = kubectl.run("apply", "-f", "-", stdin=text)
        print(printable(answer).rstrip())
        print(f"its output: paceline runs logs --follow {shlex.quote(printable(job.run))}")
        return 0

    def status(self, submission: Submission) -> str:
        """What the cluster says of the job, and of its pods."""
        kubectl, kind = Kubectl.of_submission(submission), submission.details["kind"]
        found = kubectl.run(
            "get", resource(kind, submission.job), "--ignore-not-found", "-o", "json"
        )
        if not found.strip():
            return f"{resource(kind, submission.job)} is not there: not applied yet, or deleted"
        return f"{resource(kind, submission.job)} {_state(found)}"

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """The output of all pods, each line with its pod."""
        kubectl = Kubectl.of_submission(submission)
        pods = submission.details.get("pods", "1")
        following = ("--follow",) if follow else ()
        return kubectl.stream(
            *("logs", "-l", f"{RUN_LABEL}={submission.job}", "--prefix", "--tail=-1"),
            *("--max-log-requests", pods, *following),
        )

    def cancel(self, submission: Submission) -> str:
        """Delete the job: its pods get SIGTERM, save and leave. Then what belongs to it."""
        kubectl, kind = Kubectl.of_submission(submission), submission.details["kind"]
        # In the foreground: it is gone when its pods are, and they have saved by then.
        kubectl.run(
            *("delete", resource(kind, submission.job), "--ignore-not-found"),
            *("--cascade=foreground", "--wait=true"),
            seconds=None,
        )
        rest = "configmap,service"
        if kind == "trainjob":
            rest += ",trainingruntime.trainer.kubeflow.org"
        kubectl.run("delete", rest, "-l", f"{RUN_LABEL}={submission.job}", "--ignore-not-found")
        where = submission.details.get("folder", "its folder")
        named = resource(kind, submission.job)
        return f"{named} was deleted after its pods had left; the run is in {where}"


def manifest(job: ClusterJob) -> str:
    """The manifest of a run."""
    name, settings = cluster_name(job), job.config.launch.kubernetes
    several = most_pods(job.config) > 1
    files, train = _files(job)
    there = replace(job, run=Path(_folder(settings, name)), resume=False)
    host = rendezvous_host(settings.kind, name)
    command = there.launcher(
        python=settings.python,
        rdzv=f"{host}:{settings.port}" if several else None,
        train=train,
    )
    plan = PodPlan(
        name=name,
        settings=settings,
        command=tuple(command),
        labels={
            "app.kubernetes.io/name": "paceline",
            "app.kubernetes.io/managed-by": "paceline",
            **settings.labels,
            RUN_LABEL: name,
        },
        grace=job.config.launch.grace,
        container=container_name(settings.kind),
        subdomain=name if several and settings.kind == "job" else None,
    )
    return write(documents(plan, job.config, files))


def cluster_name(job: ClusterJob) -> str:
    """The run's name on the cluster: the config's, else made of the name of its folder.

    The same folder has the same name, so that a command that is repeated goes on with its run. A
    name that had to be changed has a digest of the folder's own, to be no other's.
    """
    if job.config.launch.kubernetes.name is not None:
        return job.config.launch.kubernetes.name
    own = job.run.name
    name = re.sub(r"[^a-z0-9]+", "-", own.lower(), flags=re.ASCII).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")
    if name == own and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(own.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def _folder(settings: Kubernetes, name: str) -> PurePosixPath:
    return PurePosixPath(settings.runs) / name


def _files(job: ClusterJob) -> tuple[dict[str, str], list[str]]:
    """What pods are given as files, and the arguments that name them there."""
    if job.train[:1] == ("--script",):
        script = Path(job.train[1])
        try:
            text = script.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--script {script}: cannot be read: {error}.") from None
        return {"script.py": text}, ["--script", f"{CONFIG_FOLDER}/script.py", *job.train[2:]]
    # What the engine says by flags; and a file of this machine is none of a pod's.
    own = {"on": "local", "nnodes": 1, "rdzv": None, "secret": None}
    launch = job.config.launch.model_copy(update=own)
    config = job.config.model_copy(update={"launch": launch})
    return {_CONFIG_FILE: dump(config)}, [f"{CONFIG_FOLDER}/{_CONFIG_FILE}"]


def _make_secret(name: str, settings: Kubernetes) -> str:
    kubectl = Kubectl.of(settings)
    make = kubectl.shown(
        "create", "secret", "generic", name, f"--from-file={SECRET_KEY}=secret.txt"
    )
    return f"paceline secret secret.txt && {make}"


def _first(job: ClusterJob, name: str) -> list[str]:
    """What has to be there before the run, one line each."""
    settings = job.config.launch.kubernetes
    if settings.secret is not None:
        return [
            f"needs the Secret {settings.secret}; to make it: "
            f"{_make_secret(settings.secret, settings)}"
        ]
    if most_pods(job.config) > 1:
        return [
            "warning: the pods meet without a secret: any other pod that reaches them can take "
            f"part in the run or end it. To close it: {_make_secret(name, settings)}; then "
            f"launch.kubernetes.secret: {name}"
        ]
    return []


def _state(found: str) -> str:
    """The conditions and counts in what kubectl answered, in a few words."""
    try:
        status = parse_json(found.encode())["status"]
        conditions = status.get("conditions") or []
        true = [c["type"] for c in conditions if c.get("status") == "True"]
        counts = [
            f"{status[key]} {key}"
            for key in ("active", "ready", "succeeded", "failed")
            if isinstance(status.get(key), int)
        ]
        message = next((c["message"] for c in reversed(conditions) if c.get("message")), "")
    except (KeyError, ValueError, TypeError, AttributeError):
        return "has no status yet"
    words = ", ".join([*(true or ["Pending"]), *counts])
    return printable(f"{words}: {message}" if message and true else words)


class Kubectl:
    """The user's own kubectl, with its configuration, for one namespace."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        self._context, self._namespace = context, namespace

    @classmethod
    def of(cls, settings: Kubernetes) -> Kubectl:
        """As a config says."""
        return cls(settings.context, settings.namespace)

    @classmethod
    def of_submission(cls, submission: Submission) -> Kubectl:
        """As a run was handed over."""
        details = submission.details
        return cls(details.get("context"), details.get("namespace"))

    def details(self) -> dict[str, str]:
        """What to keep, to reach the same place again."""
        named = {"context": self._context, "namespace": self._namespace}
        return {key: value for key, value in named.items() if value is not None}

    def command(self, *arguments: str) -> list[str]:
        """The words of a command."""
        context = () if self._context is None else (f"--context={self._context}",)
        namespace = () if self._namespace is None else (f"--namespace={self._namespace}",)
        return ["kubectl", *context, *namespace, *arguments]

    def shown(self, *arguments: str) -> str:
        """A command, for a person to type."""
        return shlex.join(self.command(*arguments))

    def check(self) -> None:
        """Refuse to go on without a kubectl."""
        if shutil.which("kubectl") is None:
            raise ConfigError(
                "--apply: there is no kubectl on PATH. Install it and give it access to the "
                "cluster; or leave --apply out, and apply the manifest where there is one."
            )

    def run(self, *arguments: str, stdin: str = "", seconds: float | None = _ANSWER_SECONDS) -> str:
        """What a command prints; ``LaunchError`` with its own words where it fails."""
        self.check()
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=stdin.encode(),
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"{self.shown(*arguments)}: no answer in {seconds:g} s. Try it by hand."
            ) from None
        if done.returncode:
            words = printable(done.stderr.decode("utf-8", "replace").strip())
            raise LaunchError(
                f"{self.shown(*arguments)}: failed with status {done.returncode}: {words}"
            )
        return done.stdout.decode("utf-8", "replace")

    def stream(self, *arguments: str) -> int:
        """Run a command that writes to the console itself; its exit status."""
        self.check()
        sys.stdout.flush()
        return subprocess.run(self.command(*arguments), check=False).returncode
