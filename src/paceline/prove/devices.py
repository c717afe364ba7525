"""Where a proof runs: on the CPU, or on GPUs, one rank to each or shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import Config
from paceline.config.devices import count_gpus
from paceline.errors import ConfigError
from paceline.prove.cases import Case

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ProofDevice:
    """The kind of device that all runs of a proof use: ``cpu`` or ``cuda``."""

    kind: str = "cpu"
    gpus: int = 0
    note: str | None = None
    """Why it is not the device that the run would use."""

    def shares(self, ranks: int) -> bool:
        """Whether a world of ``ranks`` has more ranks than GPUs, which then share."""
        return self.kind == "cuda" and ranks > self.gpus


def choose(
    device: str, cases: Sequence[Case], *, share_gpu: bool = False, gpus: int | None = None
) -> ProofDevice:
    """Where to prove ``cases``; raises ``ConfigError`` where that cannot be.

    ``auto`` is what a run on this machine would use: GPUs where there are enough of them (or the
    ranks share), else the CPU.
    """
    if device not in DEVICES:
        raise ConfigError(f"device={device} must be one of {', '.join(DEVICES)}")
    found = count_gpus() if gpus is None else gpus
    most = max((case.layout.world_size for case in cases), default=1)
    if share_gpu and (problem := _sharing_problem(device, found, most)):
        raise ConfigError(f"share_gpu {problem}")
    if device == "cpu" or (device == "auto" and not found):
        return ProofDevice()
    if not found:
        raise ConfigError(
            "device=cuda, but torch can use no GPU on this machine; use cpu, or a torch built for "
            "CUDA on a machine with a GPU"
        )
    if most <= found or share_gpu:
        return ProofDevice("cuda", found)
    large = max(cases, key=lambda case: case.layout.world_size)
    needs = f"{large} takes {most} GPUs, but this machine has {found}"
    if device == "cuda":
        raise ConfigError(
            f"device=cuda: {needs}; let ranks share GPUs (share_gpu=True, --share-gpu), or use cpu"
        )
    return ProofDevice(note=f"on the CPU: {needs}; with --share-gpu the ranks share")


def choose_for(
    config: Config, device: str, cases: Sequence[Case], *, share_gpu: bool = False
) -> ProofDevice:
    """``choose`` for a config, whose ``launch`` says what is not asked for."""
    gpus = count_gpus()
    if device == "auto" and config.launch.device == "cpu":
        device = "cpu"
    if config.launch.share_gpu and device != "cpu":
        share_gpu |= any(case.layout.world_size > gpus > 0 for case in cases)
    return choose(device, cases, share_gpu=share_gpu, gpus=gpus)


def _sharing_problem(device: str, gpus: int, most: int) -> str | None:
    if device == "cpu":
        return "with device=cpu: there is no GPU to share; leave one of them out"
    if not gpus:
        return "needs a GPU, but torch can use none on this machine; leave it out"
    if most <= gpus:
        return (
            f"has nothing to do: no layout has more than {most} ranks, and there are {gpus} GPUs; "
            "leave it out, or hide GPUs with CUDA_VISIBLE_DEVICES"
        )
    return None
