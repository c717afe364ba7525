"""The section ``launch.kubernetes``: what the pods of a run are given.

Names, labels, quantities and paths are checked here by Kubernetes' own rules, so that a mistake is
found before anything is handed over.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.config.fields import Positive
from paceline.config.sections import Section

LONGEST_NAME = 40
"""Characters of a run's name on the cluster: those of pods, made of it, have at most 63."""
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"


def _matching(pattern: str, rule: str, longest: int) -> AfterValidator:
    def check(text: str) -> str:
        if len(text) > longest or not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"{text[:60]!r} {rule}, of at most {longest} characters")
        return text

    return AfterValidator(check)


def _key(text: str) -> str:
    prefix, slash, name = text.rpartition("/")
    domain = rf"{_LABEL}(\.{_LABEL})*"
    sound = re.fullmatch(_QUALIFIED, name, re.ASCII) and len(name) <= 63
    if not sound or (slash and (len(prefix) > 253 or not re.fullmatch(domain, prefix, re.ASCII))):
        raise ValueError(
            f"{text[:60]!r} must be a key as Kubernetes has them: letters, digits, - _ and . (63 "
            "characters at most), with or without a domain and / in front"
        )
    return text


def _path(text: str) -> str:
    path = PurePosixPath(text)
    plain = text.isprintable() and ":" not in text and ".." not in path.parts
    if not path.is_absolute() or str(path) != text or text.startswith("//") or not plain:
        raise ValueError(f"{text[:60]!r} must be an absolute path like /data, without '..' and ':'")
    if text == "/":
        raise ValueError("'/' must be a folder below /")
    return text


def _no_reserved_path(claims: dict[str, str]) -> dict[str, str]:
    for path in claims:
        if PurePosixPath(path).parts[1] in ("dev", "proc", "sys", "tmp", "etc"):
            raise ValueError(f"{path}: is the system's or Paceline's own; choose another, as /data")
    return claims


Name = Annotated[
    str,
    _matching(
        rf"{_LABEL}(\.{_LABEL})*",
        "must be a name as Kubernetes has them: small letters, digits, - and ., a letter or digit "
        "first and last",
        253,
    ),
]
RunName = Annotated[
    str,
    _matching(
        r"[a-z]([-a-z0-9]*[a-z0-9])?",
        "must be small letters, digits and -, a letter first, a letter or digit last",
        LONGEST_NAME,
    ),
]
Namespace = Annotated[
    str, _matching(_LABEL, "must be small letters, digits and -, none of them - at an end", 63)
]
Key = Annotated[str, AfterValidator(_key)]
LabelValue = Annotated[
    str,
    _matching(
        rf"({_QUALIFIED})?",
        "must be letters, digits, - _ and ., a letter or digit first and last",
        63,
    ),
]
Quantity = Annotated[
    str,
    _matching(
        _QUANTITY, "must be a quantity as Kubernetes has them, like '16', '500m' or '64Gi'", 32
    ),
]
Image = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
        "must be the name of an image, like registry.example/paceline:1.0",
        512,
    ),
]
Variable = Annotated[
    str, _matching(r"[A-Za-z_][A-Za-z0-9_]*", "must be the name of an environment variable", 256)
]
SecretKey = Annotated[
    str,
    _matching(
        rf"{_LABEL}(\.{_LABEL})*/[-._A-Za-z0-9]+",
        "must be SECRET/KEY, the names of a Secret and of a key in it",
        512,
    ),
]
Capability = Annotated[
    str, _matching(r"[A-Z][A-Z_]*", "must be a capability of Linux, like IPC_LOCK", 64)
]
PodPath = Annotated[str, AfterValidator(_path)]
Id = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Toleration(Section):
    """A taint of nodes that the pods bear."""

    key: Key | None = Field(default=None, description="The taint's key; null: any.")
    operator: Literal["Exists", "Equal"] = Field(
        default="Exists", description="Exists: whatever its value; Equal: of this value."
    )
    value: LabelValue | None = Field(default=None, description="The taint's value, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="The taint's effect; null: all of them."
    )


class Kubernetes(Section):
    """Launching on Kubernetes: one pod for every machine, one launcher in each."""

    kind: Literal["job", "jobset", "trainjob", "pytorchjob"] = Field(
        default="job",
        description="What runs the pods: an Indexed Job with a headless Service, a JobSet, or a "
        "TrainJob or PyTorchJob of Kubeflow.",
    )
    image: Image | None = Field(default=None, description="The image of the pods. Needed.")
    pull: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled; null: as the cluster does."
    )
    pull_secrets: list[Name] = Field(default=[], description="Secrets to pull the image with.")
    context: str | None = Field(
        default=None, min_length=1, description="kubectl's context; null: its current one."
    )
    namespace: Namespace | None = Field(
        default=None, description="Namespace; null: that of kubectl's context."
    )
    name: RunName | None = Field(
        default=None, description="The run's name on the cluster; null: from its folder's name."
    )
    labels: dict[Key, LabelValue] = Field(
        default={}, description="Labels of everything, like kueue.x-k8s.io/queue-name: team-a."
    )
    annotations: dict[Key, str] = Field(default={}, description="Annotations of job and pods.")
    python: str = Field(default="python", min_length=1, description="The image's Python.")
    workdir: PodPath | None = Field(
        default=None,
        description="Folder of the image where your code is; null: the image's own WORKDIR.",
    )
    gpus: Positive | None = Field(default=None, description="GPUs of every pod.")
    gpu_resource: Key = Field(
        default="nvidia.com/gpu", description="What the cluster calls its GPUs."
    )
    cpus: Quantity | None = Field(default=None, description="Cores of every pod, like '16'.")
    memory: Quantity | None = Field(
        default=None, description="Memory of every pod, like '64Gi', shared memory included."
    )
    resources: dict[Key, Quantity] = Field(
        default={}, description="Further resources of every pod, like vpc.amazonaws.com/efa: '4'."
    )
    shm: Quantity = Field(
        default="2Gi", description="Size of /dev/shm: data loaders and NCCL need it."
    )
    tmp: Quantity | None = Field(
        default=None, description="Most that a pod may write to /tmp; null: no limit of its own."
    )
    claim: Name | None = Field(
        default=None,
        description="The PersistentVolumeClaim that run folders are on; ReadWriteMany for several "
        "machines. Needed: a run without its folder cannot go on.",
    )
    runs: PodPath = Field(
        default="/runs", description="Where the pods see it; a run's folder is in it."
    )
    claims: Annotated[dict[PodPath, Name], AfterValidator(_no_reserved_path)] = Field(
        default={}, description="Further PersistentVolumeClaims by path, like /data: corpus."
    )
    secret: Name | None = Field(
        default=None,
        description="The Secret whose key 'secret' the machines of the run share; see "
        "docs/guides/launch-kubernetes.md for how to make it.",
    )
    secrets: list[Name] = Field(
        default=[], description="Secrets whose keys become environment variables."
    )
    secret_env: dict[Variable, SecretKey] = Field(
        default={}, description="Variables from Secrets, like AWS_SECRET_ACCESS_KEY: s3/key."
    )
    service_account: Name | None = Field(default=None, description="Service account of the pods.")
    service_account_token: bool = Field(
        default=False, description="Whether pods get its token, as workload identities may need."
    )
    node_selector: dict[Key, LabelValue] = Field(default={}, description="Labels of the nodes.")
    tolerations: list[Toleration] = Field(default=[], description="Taints that the pods bear.")
    priority_class: Name | None = Field(default=None, description="Priority class of the pods.")
    runtime_class: Name | None = Field(default=None, description="Runtime class, like nvidia.")
    scheduler: Name | None = Field(default=None, description="Scheduler, where not the default.")
    uid: Id = Field(default=1000, description="User of the pods; never root.")
    gid: Id = Field(default=1000, description="Group of the pods, which volumes are given to.")
    read_only_root: bool = Field(
        default=True, description="Whether only /tmp, /dev/shm and volumes can be written to."
    )
    capabilities: list[Capability] = Field(
        default=[], description="Capabilities of Linux; all others are dropped. RDMA: IPC_LOCK."
    )
    host_network: bool = Field(
        default=False, description="Use the nodes' network, as some RDMA set-ups need."
    )
    port: int = Field(
        default=29400, ge=1024, le=65535, description="Where the launchers meet, on pod 0."
    )
    retries: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How often a pod that failed is started again. Preempted ones do not count, "
        "and what would only fail again is not tried.",
    )
    deadline: Positive | None = Field(
        default=None, description="Seconds that the whole run may take; null: no limit."
    )
    keep: int | None = Field(
        default=None, ge=0, description="Seconds until an ended job is deleted; null: it is kept."
    )
    suspend: bool = Field(
        default=False, description="Create it suspended, for a queue like Kueue to start it."
    )
