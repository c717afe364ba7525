"""Gathering the facts about this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import dump, with_code
from paceline.doctor.facts import ClusterFacts, Gpus, Machine, ModelSize, Network, Speed, Versions
from paceline.doctor.facts_config import Asked
from paceline.doctor.facts_folders import Tokens
from paceline.doctor.facts_gpus import gather_gpus
from paceline.doctor.facts_host import (
    gather_limits,
    gather_started_by,
    git_commit,
    python_version,
)
from paceline.doctor.facts_network import gather_network
from paceline.doctor.prober import ProbeJob, Prober
from paceline.version import __version__

MODEL_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 15.0
VISIT_TIMEOUT_S = 6.0


@dataclass(frozen=True)
class DoctorRequest:
    """What to examine: a config with overrides; ``wait`` seconds for the other machines."""

    source: str | None = None
    overrides: Sequence[str] = ()
    wait: float = 60.0
    flags: Mapping[str, str] = field(default_factory=dict)
    """Further overrides, with the words of the command line that they come from."""
    say: Callable[[str], None] = field(default=lambda text: None)


def examine_alone(own: OwnMachine, tokens: Tokens) -> ClusterFacts:
    """What there is to know without any other machine."""
    name = socket.gethostname()
    speeds = own.start_collectives(name)
    machine = own.gather(name, gather_network(), tokens)
    return ClusterFacts((machine,), speeds=tuple(speed() for speed in speeds))


class OwnMachine:
    """This machine, and the helper process that answers what needs torch."""

    def __init__(self, asked: Asked, stack: contextlib.ExitStack) -> None:
        self.asked = asked
        self.prober = Prober()
        stack.callback(self.prober.close)
        self._stack = stack
        self._gpus: Gpus | None = None
        self._model: ProbeJob | None = None
        if asked.config is not None:
            text = dump(with_code(asked.config))
            self._model = self.prober.submit("model_size", MODEL_TIMEOUT_S, config=text)

    @property
    def gpus(self) -> Gpus:
        """The GPUs here, asked for once."""
        if self._gpus is None:
            self._gpus = gather_gpus()
        return self._gpus

    @property
    def collective_ranks(self) -> dict[str, int]:
        """How many local ranks to measure collectives with, by backend."""
        ranks = {"gloo": min(self.asked.plan.nproc, 2)}
        if self.asked.plan.on_gpu and self.gpus.visible:
            ranks["nccl"] = min(self.asked.plan.nproc, self.gpus.visible)
        # A single GPU has nobody to talk to; but whether NCCL starts at all is worth knowing.
        return {
            backend: count for backend, count in ranks.items() if count > 1 or backend == "nccl"
        }

    def who_serves(self, host: str, port: int, keys: dict[str, str]) -> str:
        """The name of the first of ``keys`` that the store at ``host:port`` has; else empty."""
        patience = VISIT_TIMEOUT_S / 2
        job = self.prober.submit(
            "visit",
            VISIT_TIMEOUT_S,
            host=host,
            port=port,
            keys=keys,
            patience_s=patience,
        )
        return str(job.result().get("found") or "")

    def start_collectives(self, name: str) -> list[Callable[[], Speed]]:
        """Begin to all-reduce among local ranks; each item waits for its speed."""
        waiting: list[Callable[[], Speed]] = []
        for backend, count in self.collective_ranks.items():
            folder = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="paceline-doctor-")
            )
            jobs = [
                self.prober.submit(
                    "collective",
                    COLLECTIVE_TIMEOUT_S,
                    backend=backend,
                    rank=rank,
                    size=count,
                    store={"file": str(Path(folder) / "store")},
                    prefix=backend,
                    patience_s=COLLECTIVE_TIMEOUT_S,
                    device="cpu" if backend == "gloo" else f"cuda:{rank}",
                )
                for rank in range(count)
            ]
            members = tuple(f"{name} rank {rank}" for rank in range(count))
            waiting.append(functools.partial(speed_of, members, backend, jobs))
        return waiting

    def gather(self, name: str, network: Network, tokens: Tokens) -> Machine:
        """Everything that this machine can find out about itself."""
        folders = tokens.write(name)
        limits, gpus = gather_limits(), self.gpus
        commit = git_commit(os.getcwd())
        hello = self.prober.hello
        versions = Versions(
            paceline=__version__,
            torch=hello.get("torch", ""),
            python=python_version(),
            cuda=hello.get("cuda", ""),
            nccl=hello.get("nccl", ""),
            config=self.asked.hash,
            commit=commit,
            torch_error=hello.get("error", ""),
        )
        return Machine(
            name=name,
            network=network,
            limits=limits,
            versions=versions,
            gpus=gpus,
            folders=folders,
            model=self._model_size(),
            plan=self.asked.plan,
            started_by=gather_started_by(),
        )

    def _model_size(self) -> ModelSize:
        if self._model is None:
            return ModelSize(error="there is no config to build it from")
        result: dict[str, Any] = self._model.result()
        return replace(ModelSize(), **result)


def speed_of(members: tuple[str, ...], backend: str, jobs: Sequence[ProbeJob]) -> Speed:
    """What the ranks of one measurement found together: the slowest of them counts."""
    results = [job.result() for job in jobs]
    errors = list(dict.fromkeys(result["error"] for result in results if "error" in result))
    if errors:
        return Speed(members, backend, error="; ".join(errors))
    return Speed(
        members,
        backend,
        rate=min(result["rate"] for result in results),
        latency=max(result["latency"] for result in results),
    )
