"""What the tests of Kubernetes' manifests share: configs, jobs, and the schemas they must meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile import read_in_both_ways

from paceline.config import load
from paceline.launch.engines import ClusterJob
from paceline.launch.engines.kubernetes import manifest

KINDS = ("job", "jobset", "trainjob", "pytorchjob")
KUBERNETES_VERSION = "1.37.0"

NEEDED: dict[str, Any] = {"image": "registry.example/paceline:1.0", "claim": "runs"}
EVERYTHING: dict[str, Any] = NEEDED | {
    "context": "prod",
    "namespace": "team-a",
    "pull": "Always",
    "pull_secrets": ["registry"],
    "labels": {"kueue.x-k8s.io/queue-name": "team-a"},
    "annotations": {"example.com/why": "because: $(this) 'works'"},
    "python": "/opt/venv/bin/python",
    "workdir": "/workspace",
    "gpus": 8,
    "cpus": "64",
    "memory": "512Gi",
    "resources": {"vpc.amazonaws.com/efa": "4"},
    "shm": "64Gi",
    "tmp": "100Gi",
    "runs": "/mnt/runs",
    "claims": {"/data": "corpus"},
    "secret": "run-secret",
    "secrets": ["wandb"],
    "secret_env": {"AWS_SECRET_ACCESS_KEY": "s3/key"},
    "service_account": "trainer",
    "service_account_token": True,
    "priority_class": "high",
    "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Equal", "value": "true"},
    ],
    "runtime_class": "nvidia",
    "scheduler": "volcano",
    "uid": 2000,
    "gid": 3000,
    "read_only_root": False,
    "capabilities": ["IPC_LOCK"],
    "host_network": True,
    "port": 30000,
    "retries": 5,
    "deadline": 86400,
    "suspend": True,
}


def job_of(
    kubernetes: dict[str, Any] = NEEDED,
    *,
    run: str = "/here/runs/gpt-1",
    script: tuple[str, ...] = (),
    train: tuple[str, ...] = ("/here/my.yaml",),
    apply: bool = False,
    **settings: Any,
) -> ClusterJob:
    """A job as ``paceline train --on kubernetes`` makes it; ``settings`` are those of ``launch``."""
    launch = {"on": "kubernetes", "nnodes": 2, **settings, "kubernetes": kubernetes}
    return ClusterJob(
        config=load({"launch": launch}),
        train=train,
        run=Path(run),
        folder=Path("/here"),
        script_arguments=script,
        apply=apply,
    )


def documents_of(job: ClusterJob) -> dict[str, Any]:
    """The documents of a manifest by kind, as every reader sees them."""
    first, second = read_in_both_ways(manifest(job))
    assert first == second
    return {document["kind"]: document for document in first}


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    """The spec of the pods in any manifest."""
    if "PyTorchJob" in found:
        return found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    return job_spec_of(found)["template"]["spec"]


def job_spec_of(found: dict[str, Any]) -> dict[str, Any]:
    """The spec of the Job in any manifest."""
    if "Job" in found:
        return found["Job"]["spec"]
    if "JobSet" in found:
        return found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    template = found["TrainingRuntime"]["spec"]["template"]
    return template["spec"]["replicatedJobs"][0]["template"]["spec"]


# Schemas, unknown fields refused.


def check_schema(document: dict[str, Any]) -> None:
    """Raise unless the document is one of its kind, with no field that the kind does not have."""
    kind = document["kind"]
    if kind == "PyTorchJob":
        _check_pytorchjob(document)
    elif kind in _TRAINERS:
        module, name = _TRAINERS[kind]
        models = pytest.importorskip(f"kubeflow_trainer_api.models.{module}")
        read = getattr(models, name).from_dict(document)  # types and required fields
        assert read.to_dict() == document  # what it does not know it has left out
    else:
        schemas = pytest.importorskip("kubernetes_validate")
        schemas.validate(document, KUBERNETES_VERSION, strict=True)


_TRAINERS = {
    "JobSet": ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    "TrainJob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    "TrainingRuntime": ("trainer_v1alpha1_training_runtime", "TrainerV1alpha1TrainingRuntime"),
}
"""The models that Kubeflow publishes of its own API, and of JobSet's."""


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _check_pytorchjob(document: dict[str, Any]) -> None:
    """By the fields of kubeflow.org/v1 (training-operator 1.9); its pods by Kubernetes' schema."""
    jsonschema = pytest.importorskip("jsonschema")
    number, text, flag = {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "boolean"}
    replicas = _closed(
        {
            "replicas": number,
            "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
            "template": {"type": "object"},
        },
        "template",
    )
    policy = _closed(
        {
            "activeDeadlineSeconds": number,
            "backoffLimit": number,
            "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
            "managedBy": text,
            "schedulingPolicy": {"type": "object"},
            "suspend": flag,
            "ttlSecondsAfterFinished": number,
        }
    )
    roles = _closed({"Master": replicas, "Worker": replicas}, "Master")
    spec = _closed(
        {
            "runPolicy": policy,
            "pytorchReplicaSpecs": roles,
            "elasticPolicy": {"type": "object"},
            "nprocPerNode": text,
        },
        "pytorchReplicaSpecs",
    )
    whole = _closed(
        {
            "apiVersion": {"const": "kubeflow.org/v1"},
            "kind": {"const": "PyTorchJob"},
            "metadata": {"type": "object"},
            "spec": spec,
        },
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    )
    jsonschema.validate(document, whole)
    for role in document["spec"]["pytorchReplicaSpecs"].values():
        template = json.loads(json.dumps(role["template"]))
        template["spec"]["restartPolicy"] = "Never"  # the operator's to set
        job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": template}}
        check_schema({**job, "metadata": document["metadata"]})
