"""Starting and ending, who is who, and what this Horovod was built with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set, register
from paceline.compat.horovod.runtime.session import Session


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Join the other processes of the job; alone where no launcher started this one.

    ``comm`` is a list of ranks of the world that form the job, for all of them by default.
    ``process_sets`` are made at once, or ``"dynamic"``: to be made later. A second call, without
    ``shutdown()`` in between, changes nothing.
    """
    if comm is not None and not isinstance(comm, list | tuple | range):
        raise ValueError(
            f"hvd.init(comm={comm!r}): give a list of ranks. MPI communicators are not supported, "
            "since MPI is not used."
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets={process_sets!r} must be a list or 'dynamic'.")
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    if Session.exists():
        return
    session = Session.begin(comm)
    global_process_set.ranks = list(range(session.topology.size))
    for place, process_set in enumerate(process_sets or []):
        try:
            register(session, process_set)
        except ValueError as error:
            raise ValueError(
                f"Horovod could not be initialized because of process_sets entry number {place}: "
                f"{error}"
            ) from error


def shutdown() -> None:
    """Leave the job. What other ranks still have outstanding fails there."""
    if Session.exists():
        Session.current().end()


def is_initialized() -> bool:
    """Whether ``init()`` was called, and ``shutdown()`` was not."""
    return Session.exists()


def rank() -> int:
    """The number of this process in the job."""
    return Session.current().topology.rank


def size() -> int:
    """How many processes the job has."""
    return Session.current().topology.size


def local_rank() -> int:
    """The number of this process on its machine."""
    return Session.current().topology.local_rank


def local_size() -> int:
    """How many processes of the job this machine has."""
    return Session.current().topology.local_size


def cross_rank() -> int:
    """The number of this machine, among those that have this ``local_rank()``."""
    return Session.current().topology.cross_rank


def cross_size() -> int:
    """How many machines have this ``local_rank()``."""
    return Session.current().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every machine has equally many processes."""
    return Session.current().topology.is_homogeneous


def mpi_threads_supported() -> bool:
    """Refused: MPI is not used."""
    raise ValueError(
        "Horovod MPI is not enabled; tensors travel over Gloo and NCCL here, whatever started the "
        "processes."
    )


def mpi_enabled() -> bool:
    """``False``: tensors never travel over MPI, even where ``mpirun`` started the processes."""
    return False


def mpi_built() -> bool:
    """``False``, see ``mpi_enabled``."""
    return False


def gloo_enabled() -> bool:
    """``True``: ranks negotiate, and move tensors in host memory, over Gloo."""
    return True


def gloo_built() -> bool:
    """Whether this build of torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as a number, 22105 for 2.21.5; 0 where this build of torch has none."""
    if not dist.is_nccl_available():
        return 0
    version: Any = torch.cuda.nccl.version()
    major, minor, patch = version[:3]
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """``False``: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """``False``: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this build of torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this build of torch has ROCm."""
    return torch.version.hip is not None
