"""What the workers of Ray Train are told of the run: plain values, which Ray sends to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class RankOrders:
    """One run, for each of its workers; see ``paceline.trainer.ray_rank``."""

    SHIPPED: ClassVar[str] = "PACELINE_RAY_FOLDER"
    """The variable with the folder in which Ray started a worker: that of the code it shipped."""
    HOSTS: ClassVar[str] = "PACELINE_RAY_HOSTS"
    """The variable with the names of all nodes, as JSON, in the order of their ranks."""
    NAMESPACE: ClassVar[str] = "paceline"
    """That of the actors by which runs are controlled."""

    run: str
    """The run's folder, which all nodes share."""
    folder: str
    """Where the command was typed."""
    identity: str | None = None
    """The mark in the run's folder by which a node knows that it shares it."""
    resume: bool = False
    settings: str | None = None
    """The file of other settings than the run has, with which it goes on."""
    script: str | None = None
    arguments: tuple[str, ...] = ()
    backend: str | None = None
    """The library that the script is written for."""
    shipped: bool = False
    """Ray ships the code: ranks run where it puts it."""
    copies: bool = False
    """Ray has a storage of its own, to which checkpoints are copied."""
    control: str | None = None
    """The actor to ask whether the run is to save and leave."""

    def told(self) -> dict[str, Any]:
        """As the training function gets it."""
        return asdict(self)
