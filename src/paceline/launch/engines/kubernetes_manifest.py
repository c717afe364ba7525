"""A run as the documents that Kubernetes is given: a ConfigMap, and what runs the pods.

When a pod is started again agrees with ``restart_policy``:

- It was preempted, evicted or lost its node, or was told to leave and saved: not a failure.
- Its launcher says that to start again would only repeat the failure: the job has failed.
- Anything else counts, ``launch.kubernetes.retries`` times for each pod.

Launchers start failed ranks again by themselves, ``launch.max_restarts`` times; a pod that ends
has used these up already, or was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml

from paceline.config import Config
from paceline.config.fields import node_range
from paceline.errors import ConfigError
from paceline.launch import exit_codes
from paceline.launch.engines.kubernetes_pods import Data, PodPlan, pod_template, without_empty

REPLICATED = "node"
"""The pods' name in a JobSet; Kubeflow's Trainer expects this one."""
_TRAINER_GROUP = "trainer.kubeflow.org"
_TORCHS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LARGEST_CONFIG_MAP = 900 * 1024


def documents(plan: PodPlan, config: Config, files: dict[str, str]) -> list[Data]:
    """All documents of a run, in the order to create them in. ``files`` go into the ConfigMap."""
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in files.values())
    if size > _LARGEST_CONFIG_MAP:
        raise ConfigError(
            f"config and script have {size} bytes, but a ConfigMap holds {_LARGEST_CONFIG_MAP}. "
            "Put the script into the image, and a part of it that only imports it here."
        )
    files = {name: Literal(text) for name, text in files.items()}
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(plan), "data": files}
    return [settings, *_KINDS[plan.settings.kind](plan, config)]


def rendezvous_host(kind: str, name: str) -> str:
    """The name that pod 0 has for the others, and keeps when it is started again."""
    return {
        "job": f"{name}-0.{name}",
        "jobset": f"{name}-{REPLICATED}-0-0.{name}",
        "trainjob": f"{name}-{REPLICATED}-0-0.{name}",
        "pytorchjob": f"{name}-master-0",
    }[kind]


def container_name(kind: str) -> str:
    """What each controller calls the container that trains."""
    return {"trainjob": REPLICATED, "pytorchjob": "pytorch"}.get(kind, "paceline")


def resource(kind: str, name: str) -> str:
    """The object that stands for the whole run, as kubectl names it."""
    kinds = {
        "job": "job.batch",
        "jobset": "jobset.jobset.x-k8s.io",
        "trainjob": f"trainjob.{_TRAINER_GROUP}",
        "pytorchjob": "pytorchjob.kubeflow.org",
    }
    return f"{kinds[kind]}/{name}"


def most_pods(config: Config) -> int:
    """How many pods there are; fewer may do."""
    return _nodes(config)[1]


# One function for each kind.


def _job(plan: PodPlan, config: Config) -> list[Data]:
    spec = _job_spec(plan, config) | {
        "ttlSecondsAfterFinished": plan.settings.keep,
        "suspend": True if plan.settings.suspend else None,
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(plan)}
    job["spec"] = without_empty(spec)
    return [*([] if plan.subdomain is None else [_service(plan)]), job]


def _service(plan: PodPlan) -> Data:
    """What gives the pods of a Job stable names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan),
        "spec": {
            "clusterIP": "None",
            # Launchers look for each other before any of them could count as ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": plan.name},
            "ports": [{"name": "rendezvous", "port": plan.settings.port, "protocol": "TCP"}],
        },
    }


def _jobset(plan: PodPlan, config: Config) -> list[Data]:
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(plan),
        "spec": _jobset_spec(plan, _job_spec(plan, config))
        | without_empty(
            {
                "ttlSecondsAfterFinished": plan.settings.keep,
                "suspend": True if plan.settings.suspend else None,
            }
        ),
    }
    return [jobset]


def _jobset_spec(plan: PodPlan, job: Data, labels: Data | None = None) -> Data:
    template = without_empty({"metadata": {"labels": labels} if labels else None, "spec": job})
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # The Job in it has a policy of its own; when that has given up, all have.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": template}],
    }


def _trainjob(plan: PodPlan, config: Config) -> list[Data]:
    """A runtime of its own for the run, and a TrainJob of it.

    The runtime's policy is the plain one: torch's would set variables for torchrun.
    """
    version = f"{_TRAINER_GROUP}/v1alpha1"
    step = {f"{_TRAINER_GROUP}/trainjob-ancestor-step": "trainer"}
    job = _job_spec(plan, config)
    del job["completions"], job["parallelism"]  # they follow from numNodes
    spec = _jobset_spec(plan, job, step)
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": _metadata(plan, {f"{_TRAINER_GROUP}/framework": "paceline"}),
        "spec": {"mlPolicy": {"numNodes": most_pods(config)}, "template": {"spec": spec}},
    }
    trainjob = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": _metadata(plan),
        "spec": without_empty(
            {
                "runtimeRef": {
                    "apiGroup": _TRAINER_GROUP,
                    "kind": "TrainingRuntime",
                    "name": plan.name,
                },
                "trainer": {"numNodes": most_pods(config)},
                "suspend": True if plan.settings.suspend else None,
            }
        ),
    }
    return [runtime, trainjob]


def _pytorchjob(plan: PodPlan, config: Config) -> list[Data]:
    """A master and workers, all of which run the same launcher.

    Its policy by exit codes restarts what ended with 128 or more, so what was killed or told to
    leave, and fails with the rest. It counts preempted pods as failed, hence no backoffLimit.
    """
    # The operator sets torch's variables of one rank in each pod, which is not what runs there.
    unset = [word for name in _TORCHS_VARIABLES for word in ("-u", name)]
    command = ("env", *unset, *plan.command)
    template = pod_template(replace(plan, command=command), restart_policy=None)
    port = {"name": "pytorchjob-port", "containerPort": plan.settings.port, "protocol": "TCP"}
    template["spec"]["containers"][0]["ports"] = [port]
    replicas = {"Master": 1, "Worker": most_pods(config) - 1}
    spec = {
        "runPolicy": without_empty(
            {
                "cleanPodPolicy": "Running",
                "activeDeadlineSeconds": plan.settings.deadline,
                "ttlSecondsAfterFinished": plan.settings.keep,
                "suspend": True if plan.settings.suspend else None,
            }
        ),
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": template}
            for role, count in replicas.items()
            if count
        },
    }
    kind = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
    return [{**kind, "metadata": _metadata(plan), "spec": spec}]


_KINDS: dict[str, Callable[[PodPlan, Config], list[Data]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
}


def _job_spec(plan: PodPlan, config: Config) -> Data:
    least, most = _nodes(config)
    spec = {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        # By pod, and none may be lost for good: launchers give up together, so each counts once.
        "backoffLimitPerIndex": plan.settings.retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": _failure_policy(plan.container),
        # A run that needs fewer machines is done when those are: others may never have started.
        "successPolicy": {"rules": [{"succeededCount": least}]} if least < most else None,
        "activeDeadlineSeconds": plan.settings.deadline,
        "template": pod_template(plan),
    }
    return without_empty(spec)


def _failure_policy(container: str) -> Data:
    def ended_with(code: int) -> Data:
        return {"containerName": container, "operator": "In", "values": [code]}

    return {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {"action": "Ignore", "onExitCodes": ended_with(exit_codes.TOLD_TO_LEAVE)},
            {"action": "FailJob", "onExitCodes": ended_with(exit_codes.WOULD_RECUR)},
        ]
    }


def _metadata(plan: PodPlan, more: Data | None = None) -> Data:
    return without_empty(
        {
            "name": plan.name,
            "namespace": plan.settings.namespace,
            "labels": {**plan.labels, **(more or {})},
            "annotations": dict(plan.settings.annotations),
        }
    )


def _nodes(config: Config) -> tuple[int, int]:
    return node_range(config.launch.nnodes)


# Writing them.


class Literal(str):
    """Text of several lines, to be written as it is where YAML allows it."""


class _Dumper(yaml.SafeDumper):
    """Quotes all text that is not plainly text to every reader.

    PyYAML quotes what YAML 1.1 would misread; to a reader of YAML 1.2, 1e3 and 0o17 are numbers.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _plain_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = text[:1].isalpha() and text.isascii() and text.replace("-", "").isalnum()
    safe = plain and not _is_word(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if safe else '"')


def _is_word(text: str) -> bool:
    words = "y n yes no on off true false null inf nan e"
    return text.lower() in words.split()


def _literal(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(str, _plain_text)
_Dumper.add_representer(Literal, _literal)


def write(found: list[Data]) -> str:
    """The documents as YAML, every value of which any reader sees as it is here."""
    try:
        text = yaml.dump_all(
            found, Dumper=_Dumper, sort_keys=False, width=10_000, explicit_start=True
        )
        text.encode("utf-8")
        _refuse_what_no_text_holds(found)
    except UnicodeEncodeError:
        raise ConfigError(_NO_TEXT) from None
    return text


_NO_TEXT = (
    "a manifest is UTF-8 text without NUL, and a name, argument or setting here is not. Take the "
    "characters out that are no text."
)


def _refuse_what_no_text_holds(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_what_no_text_holds(key)
            _refuse_what_no_text_holds(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_what_no_text_holds(item)
    elif isinstance(value, str):
        value.encode("utf-8")
        if "\0" in value:
            raise ConfigError(f"{value[:60]!r} holds a NUL. {_NO_TEXT}")
