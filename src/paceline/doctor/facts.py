"""What the doctor knows of the machines of a run: plain data, gathered elsewhere.

Facts travel between machines as JSON. The checks look at these alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Lookup:
    """A host name that was looked up, what came of it, and how long it took."""

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """Names and interfaces of a machine, and what its environment says of them."""

    host: str
    own_name: Lookup
    interfaces: tuple[Interface, ...] = ()
    address: str = ""
    """The address that the others reach this machine by; empty on a single machine."""
    gloo_variable: str = ""
    nccl_variable: str = ""
    adapters: tuple[str, ...] = ()
    """InfiniBand, RoCE and EFA adapters, as the kernel names them."""
    variables: tuple[str, ...] = ()
    """``NAME=value`` of what the environment says to NCCL, Gloo and libfabric, sorted."""
    port_range: tuple[int, int] | None = None
    """The ports that the system gives to connections: ranks listen on such."""


@dataclass(frozen=True)
class SystemLimits:
    """What the system lets the ranks have; ``None`` is no limit, or unknown."""

    cores: int
    threads: int | None = None
    """``OMP_NUM_THREADS``, where it is set."""
    files: int | None = None
    files_hard: int | None = None
    processes: int | None = None
    processes_used: int | None = None
    locked_memory: int | None = None
    """Bytes that a process may pin, as adapters need it."""
    shm_total: int | None = None
    shm_free: int | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    """The least of what the machine has available and what is left to its control group."""
    memory_group: int | None = None
    """The limit of the control group (container, batch job), where there is one."""


@dataclass(frozen=True)
class Versions:
    """What must be equal on every machine. An empty text: there is none, or it is unknown."""

    paceline: str = ""
    torch: str = ""
    python: str = ""
    cuda: str = ""
    nccl: str = ""
    config: str = ""
    """A hash of the config's values."""
    commit: str = ""
    """The git commit of the folder that the run starts in; ends with ``+`` for uncommitted work."""
    torch_error: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi reports it."""

    index: int
    name: str
    memory_total: int = 0
    memory_free: int = 0
    users: tuple[str, ...] = ()
    """The processes that use it: ``"4711 python (2.0 GiB)"``."""
    uncorrected_errors: int | None = None
    slowed_by: str = ""
    """Why its clocks are lowered: heat or power; empty when they are not."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine. ``visible`` is how many torch would use."""

    visible: int = 0
    driver: str = ""
    devices: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class FolderFacts:
    """A folder (or URL) of the run as one machine finds it."""

    key: str
    where: str
    is_url: bool = False
    holds_checkpoints: bool = False
    error: str = ""
    free: int | None = None
    sync_seconds: float | None = None
    """How long it took to write ``SYNC_BYTES`` so that they are on the disk."""


SYNC_BYTES = 4 * 2**20


@dataclass(frozen=True)
class ModelSize:
    """What the config's model and its optimizer hold; ``error`` says why it is unknown."""

    parameters: int = 0
    model_bytes: int = 0
    optimizer_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class RunPlan:
    """What the config asks of a machine."""

    source: str = ""
    problems: tuple[str, ...] = ()
    nproc: int = 1
    least_nodes: int = 1
    most_nodes: int = 1
    on_gpu: bool = False
    shares_gpu: bool = False
    """Whether more ranks than GPUs may share them (launch.share_gpu)."""
    workers: int = 0
    checkpoints_at_once: int = 1
    """How many checkpoints lie on the disk at the most, the one being written included."""
    network_env: tuple[str, ...] = ()
    """``NAME=value`` of what ``launch.env`` says to NCCL, Gloo and libfabric, sorted."""
    in_memory: bool = False
    """Whether copies are kept in shared memory (checkpoint.memory_every)."""
    copies_of_state: float = 1.0
    """Of the state of the whole model, how much a rank holds: 0.25 for a quarter."""


@dataclass(frozen=True)
class StartedBy:
    """The launcher that ``World.init`` would recognise where the doctor was started."""

    launcher: str = "none"
    variables: tuple[str, ...] = ()
    where: str = ""
    """The rank that it makes of this process, and where the ranks meet."""
    problem: str = ""
    """Why its variables are refused."""


@dataclass(frozen=True)
class Machine:
    """Everything that one machine found out about itself."""

    name: str
    network: Network
    limits: SystemLimits
    versions: Versions
    gpus: Gpus = Gpus()
    folders: tuple[FolderFacts, ...] = ()
    model: ModelSize = ModelSize()
    plan: RunPlan = RunPlan()
    started_by: StartedBy = StartedBy()
    peers: tuple[Lookup, ...] = ()
    """The other machines' names, looked up here."""


ConnectOutcome = Literal["ok", "no answer", "refused", "unreachable", "silent"]


@dataclass(frozen=True)
class Connection:
    """A connection that machine ``source`` tried to ``target``, both by name."""

    source: str
    target: str
    address: str
    port: int
    outcome: ConnectOutcome
    seconds: float = 0.0
    error: str = ""
    by_gloo: bool = False
    """Tried at the address that Gloo would give out, where that is another than the usual one."""


@dataclass(frozen=True)
class ClockOffset:
    """By how many seconds the clock of ``target`` is ahead of that of ``source``."""

    source: str
    target: str
    offset: float
    round_trip: float


@dataclass(frozen=True)
class FolderSighting:
    """Whether ``reader`` found in a folder what ``writer`` had written there."""

    key: str
    writer: str
    reader: str
    ok: bool
    error: str = ""


@dataclass(frozen=True)
class Speed:
    """Collectives among ``members``: bytes a second that each rank gets, and the time of an empty
    one. ``error`` says why there was no measuring."""

    members: tuple[str, ...]
    backend: str
    rate: float = 0.0
    latency: float = 0.0
    error: str = ""


RendezvousState = Literal[
    "met", "unresolved", "no answer", "refused", "unreachable", "taken", "too late"
]


@dataclass(frozen=True)
class RendezvousFacts:
    """How the rendezvous went: ``came`` are the machines that joined, ``left`` those lost later."""

    endpoint: str
    place: RendezvousState = "met"
    detail: str = ""
    host: str = ""
    least: int = 2
    most: int = 2
    came: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    """Machines that came and were gone (or silent) later, and during what."""
    open: str = ""
    """What is open to strangers there, and how to close it."""


@dataclass(frozen=True)
class ClusterFacts:
    """All that is known, on every machine the same."""

    machines: tuple[Machine, ...]
    meeting: RendezvousFacts | None = None
    links: tuple[Connection, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()
    seen: tuple[FolderSighting, ...] = ()
    speeds: tuple[Speed, ...] = ()
