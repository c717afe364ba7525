"""The ``TorchTrainer`` of a run: what a config says, in the words of Ray Train."""

from __future__ import annotations

import importlib
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from paceline.config import Config
from paceline.config.fields import node_range
from paceline.launch.engines.ray_orders import RankOrders

if TYPE_CHECKING:
    from ray.train.backend import BackendConfig

_RANK = "paceline.trainer.ray_rank"
_NO_PRINT_PATCH = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
"""Ray Train would send what ranks print to its loggers, not to where their output goes."""


def torch_trainer(
    config: Config, orders: RankOrders, *, use_gpu: bool, max_restarts: int | None = None
) -> TorchTrainer:
    """A ``TorchTrainer`` each of whose workers is one rank of the run that ``orders`` describe.

    ``config`` is resolved: it says how many ranks there are. ``max_restarts`` stands in for its
    ``launch.max_restarts``.
    """
    restarts = config.launch.max_restarts if max_restarts is None else max_restarts
    preemptions = config.launch.max_preemptions
    environment: dict[str, Any] = {"env_vars": {**_NO_PRINT_PATCH, **config.launch.env}}
    if config.launch.ray.working_dir is not None:
        environment["working_dir"] = config.launch.ray.working_dir
    return TorchTrainer(
        importlib.import_module(_RANK).run,
        train_loop_config=orders.told(),
        torch_config=OwnJoining(backend="nccl" if use_gpu else "gloo"),
        scaling_config=scaling(config, use_gpu=use_gpu),
        run_config=RunConfig(
            name=Path(orders.run).name,
            **_storage(config, Path(orders.run)),
            failure_config=FailureConfig(
                max_failures=restarts,
                max_preemption_failures=-1 if preemptions is None else preemptions,
            ),
            worker_runtime_env=environment,
        ),
    )


def scaling(config: Config, *, use_gpu: bool) -> ScalingConfig:
    """How many workers, and what each needs."""
    assert isinstance(config.launch.nproc, int)
    settings = config.launch.ray
    least, most = (nodes * config.launch.nproc for nodes in node_range(config.launch.nnodes))
    return ScalingConfig(
        num_workers=most if least == most else (least, most),
        use_gpu=use_gpu,
        resources_per_worker=needs_of_worker(config, use_gpu=use_gpu),
        placement_strategy=settings.placement,
    )


def needs_of_worker(config: Config, *, use_gpu: bool) -> dict[str, float]:
    """What Ray reserves for each worker."""
    settings = config.launch.ray
    gpu = {"GPU": 1.0} if use_gpu else {}
    return {"CPU": settings.cpus_per_worker, **gpu, **settings.resources}


def _storage(config: Config, run: Path) -> dict[str, Any]:
    """Where Ray keeps its records: in the run's own folder, unless the user names a place."""
    if config.launch.ray.storage_path is not None:
        return {"storage_path": config.launch.ray.storage_path}
    from pyarrow.fs import LocalFileSystem

    # With a file system of its own a path is a path, whatever characters it has.
    return {"storage_path": str(run.parent), "storage_filesystem": LocalFileSystem()}


class _Variables(Backend):
    """Sets the variables that ``World.init`` reads; the ranks join by themselves."""

    share_cuda_visible_devices = True  # LOCAL_RANK picks the GPU, as with every launcher

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called when all workers are there."""
        address, port = worker_group.execute_single(0, _address_of_rank_0)
        hosts = worker_group.execute(_host)
        worker_group.execute(_set_variables, address, port, list(dict.fromkeys(hosts)))


class OwnJoining(TorchConfig):
    """Ray Train's workers with torchrun's variables, and without a process group made for them."""

    @property
    def backend_cls(self) -> type[Backend]:
        """What sets up the workers."""
        return _Variables


def _host() -> str:
    return os.uname().nodename


def _address_of_rank_0() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        server.bind(("", 0))
        return address, int(server.getsockname()[1])


def _set_variables(address: str, port: int, hosts: list[str]) -> None:
    context = ray.train.get_context()
    os.environ.update(
        {
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "GROUP_RANK": str(context.get_node_rank()),
            "NODE_RANK": str(context.get_node_rank()),  # Ray Train's own name for it
            "GROUP_WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            RankOrders.HOSTS: json.dumps(hosts),
            # Ray Train changes the folder after this.
            RankOrders.SHIPPED: os.getcwd(),
        }
    )
