"""The pods of a run on Kubernetes: one for every machine, all alike, a launcher in each.

Pure functions from a ``PodPlan`` to plain data. A pod is closed by default: not root, no
capabilities, a root file system that cannot be written to, no token of the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.launch_kubernetes import Kubernetes, Toleration
from paceline.launch.environment import SECRET
from paceline.launch.exit_codes import SCHEDULED

Data = dict[str, Any]

CONFIG_FOLDER = "/etc/paceline"
SECRET_KEY = "secret"
"""The key, in the Secret that launch.kubernetes.secret names, of what the machines share."""
GRACE_MARGIN_SECONDS = 30
"""What a pod has beyond ``launch.grace``: launchers end their ranks first, then themselves."""
_SCRATCH = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor",
    "TRITON_CACHE_DIR": "/tmp/triton",
    # A user id need not have a name in the image; torch asks for one.
    "USER": "paceline",
    "LOGNAME": "paceline",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Variables that have everything that writes files of its own write them to /tmp."""


@dataclass(frozen=True)
class PodPlan:
    """What the pods of one run are made of."""

    name: str
    """The run's name on the cluster, which its ConfigMap has too."""
    settings: Kubernetes
    command: tuple[str, ...]
    labels: dict[str, str]
    grace: float
    container: str = "paceline"
    """The name of the container: controllers look for theirs."""
    subdomain: str | None = None
    """The headless Service that gives the pods their names, where none of the controller's does."""


def pod_template(plan: PodPlan, *, restart_policy: str | None = "Never") -> Data:
    """The template of every pod."""
    settings = plan.settings
    spec: Data = {
        "restartPolicy": restart_policy,
        "subdomain": plan.subdomain,
        "terminationGracePeriodSeconds": math.ceil(plan.grace) + GRACE_MARGIN_SECONDS,
        "automountServiceAccountToken": settings.service_account_token,
        "enableServiceLinks": False,
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
        "schedulerName": settings.scheduler,
        "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [_toleration(one) for one in settings.tolerations],
        "hostNetwork": True if settings.host_network else None,
        "dnsPolicy": "ClusterFirstWithHostNet" if settings.host_network else None,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.uid,
            "runAsGroup": settings.gid,
            "fsGroup": settings.gid,
            # Not all files of a large volume are to be given away at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan)],
        "volumes": _volumes(plan),
    }
    metadata = {"labels": plan.labels, "annotations": dict(settings.annotations)}
    return {"metadata": without_empty(metadata), "spec": without_empty(spec)}


def without_empty(data: Data) -> Data:
    """``data`` without the fields that say nothing."""
    return {
        key: value for key, value in data.items() if value is not None and value not in ({}, [])
    }


def literally(words: Sequence[str]) -> list[str]:
    """``words`` so that a pod gets them as they are: Kubernetes puts variables in for $(NAME)."""
    return [word.replace("$", "$$") for word in words]


def _container(plan: PodPlan) -> Data:
    settings = plan.settings
    resources = _resources(settings)
    security: Data = {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": settings.read_only_root,
        "capabilities": without_empty({"drop": ["ALL"], "add": list(settings.capabilities)}),
    }
    return without_empty(
        {
            "name": plan.container,
            "image": settings.image,
            "imagePullPolicy": settings.pull,
            "command": literally(plan.command),
            "workingDir": settings.workdir,
            "env": _variables(settings),
            "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
            # With requests as with limits, a pod is the last to be evicted when memory is short.
            "resources": {"requests": resources, "limits": dict(resources)} if resources else None,
            "securityContext": security,
            "volumeMounts": _mounts(settings),
        }
    )


def _resources(settings: Kubernetes) -> dict[str, str]:
    found = {
        "cpu": settings.cpus,
        "memory": settings.memory,
        settings.gpu_resource: None if settings.gpus is None else str(settings.gpus),
        **settings.resources,
    }
    return {name: value for name, value in found.items() if value is not None}


def _variables(settings: Kubernetes) -> list[Data]:
    # A non-root user reads files of a Secret through its group, which a secret's file must not
    # allow: so it comes as a variable. Launchers do not pass it on to ranks.
    secrets = dict(settings.secret_env)
    if settings.secret is not None:
        secrets[SECRET] = f"{settings.secret}/{SECRET_KEY}"
    plain: list[Data] = [{"name": name, "value": value} for name, value in _SCRATCH.items()]
    plain.append({"name": SCHEDULED, "value": "1"})
    return plain + [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for variable, (name, _, key) in ((v, found.partition("/")) for v, found in secrets.items())
    ]


def _volumes(plan: PodPlan) -> list[Data]:
    settings = plan.settings
    scratch = {} if settings.tmp is None else {"sizeLimit": settings.tmp}
    return [
        {"name": "config", "configMap": {"name": plan.name, "defaultMode": 0o444}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}},
        {"name": "tmp", "emptyDir": scratch},
        {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
        *(
            {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(settings.claims.values())
        ),
    ]


def _mounts(settings: Kubernetes) -> list[Data]:
    return [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "runs", "mountPath": settings.runs},
        *(
            {"name": f"claim-{number}", "mountPath": path}
            for number, path in enumerate(settings.claims)
        ),
    ]


def _toleration(one: Toleration) -> Data:
    return without_empty(
        {"key": one.key, "operator": one.operator, "value": one.value, "effect": one.effect}
    )
