"""``TF_CONFIG`` for ``MultiWorkerMirroredStrategy``, from the environment of any launcher.

Each rank takes a port, the ranks exchange their addresses through the launcher's store, and every
one writes the same list into its ``TF_CONFIG`` with its own place in it. A world that is started
again has other ports and may have another size; it gets a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import ipaddress
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Sequence
from datetime import timedelta

from paceline.compat.tensorflow.library import (
    KERAS_3_FAILS,
    LEGACY_KERAS,
    is_installed,
    prefer_legacy_keras,
    require_tensorflow,
)
from paceline.errors import WorldError
from paceline.launch.environment import Environment, read_environment
from paceline.launch.listening import is_loopback

TF_CONFIG = "TF_CONFIG"
HOST = "PACELINE_TF_HOST"
"""The address of this machine for the other workers, where the one that is found is wrong."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIOCGIFADDR = 0x8915
_TIMEOUT = timedelta(seconds=300)

_joined: dict[tuple[str | None, int | None, int], list[str]] = {}


def prepare_rank() -> None:
    """Make this rank a TensorFlow worker: ``TF_CONFIG``, its own GPUs, a Keras that can train."""
    require_tensorflow()
    env = read_environment()
    if env is None:
        return
    _choose_keras(env)
    join_cluster(env)


def join_cluster(env: Environment) -> list[str]:
    """Set ``TF_CONFIG`` for this rank; returns the addresses of all workers. Every rank calls it.

    A process does this once for each world; calling it again changes nothing.
    """
    key = (env.address, env.port, env.restart_count)
    if key not in _joined:
        choose_gpus(env)
        own = f"{_bracketed(address := own_address(env))}:{take_port(address)}"
        workers = _exchange(env, own)
        _check_reachable(env, workers)
        if os.environ.get(TF_CONFIG) and env.rank == 0:
            _tell(f"{TF_CONFIG} was set before; the one of this launch ({env.size} ranks) counts")
        os.environ[TF_CONFIG] = tf_config(workers, env.rank)
        _joined[key] = workers
    return _joined[key]


def tf_config(workers: Sequence[str], index: int) -> str:
    """The text of ``TF_CONFIG`` for the worker ``index`` of ``workers``, ``host:port`` each."""
    cluster = {"worker": list(workers)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def take_port(address: str) -> int:
    """A free port of this machine that stays ours until TensorFlow's server listens there.

    A socket is bound to it for the life of the process and never listens: TensorFlow's server,
    which sets ``SO_REUSEADDR`` as this one does, may bind to it as well, while the system gives it
    to nobody who asks for any free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # At every address, as TensorFlow's server will be.
    holder.bind(("", 0))
    port = int(holder.getsockname()[1])
    holder.detach()  # open for the life of the process
    return port


def own_address(env: Environment) -> str:
    """Where the other workers reach this machine.

    Loopback where all are here. Else the address of the interface in ``GLOO_SOCKET_IFNAME``, that
    on the way to ``MASTER_ADDR``, or that of the host's name; ``PACELINE_TF_HOST`` before all.
    """
    if named := os.environ.get(HOST):
        return named
    if env.nodes == 1:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and (found := _address_of_interface(interface)) is not None:
        return found
    host = env.address
    # Through a tunnel the store is at a loopback address: that says nothing of the others.
    for other in (host if host and not is_loopback(host) else None, socket.gethostname()):
        if other and (found := _address_towards(other)) and not is_loopback(found):
            return found
    return _address_towards("192.0.2.1") or socket.gethostname()


def choose_gpus(env: Environment) -> None:
    """Give this rank its share of the machine's GPUs; a worker would take all that it sees."""
    if env.local_size == 1 or env.has_own_gpus:
        return
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        found = glob.glob("/dev/nvidia[0-9]*")
        gpus = [str(n) for n in range(len([p for p in found if re.fullmatch(r".*\d+", p)]))]
    else:
        gpus = [one.strip() for one in visible.split(",") if one.strip() not in ("", "-1")]
    if not gpus:
        return
    share = len(gpus) // env.local_size
    if share == 0:
        raise WorldError(
            f"{env.local_size} TensorFlow workers on this machine but only {len(gpus)} GPU(s): "
            f"each needs its own. Start {len(gpus)} (--nproc {len(gpus)}), or train on the CPU "
            f"with {_VISIBLE}=-1."
        )
    first = env.local_rank * share
    os.environ[_VISIBLE] = ",".join(gpus[first : first + share])


def _choose_keras(env: Environment) -> None:
    """Several workers need ``tf_keras``: have ``tf.keras`` be it, and say so once."""
    if env.size == 1 or LEGACY_KERAS in os.environ:
        return
    if prefer_legacy_keras():
        told = f"tf.keras is tf_keras here: {KERAS_3_FAILS}. {LEGACY_KERAS}=0 keeps Keras 3"
    elif is_installed("tf_keras"):
        told = f"TensorFlow is imported already, with Keras 3: {KERAS_3_FAILS}"
    else:
        told = (
            f"tf_keras is not installed: {KERAS_3_FAILS}. A loop of your own with strategy.run "
            "trains either way. Install it with: pip install 'paceline[tensorflow]'"
        )
    if env.rank == 0:
        _tell(told)


def _tell(message: str) -> None:
    print(f"--backend tensorflow: {message}.", file=sys.stderr, flush=True)


def _exchange(env: Environment, own: str) -> list[str]:
    """The addresses of all workers, by rank."""
    if env.size == 1 or env.address is None:
        return [own]
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from paceline.world.joining import connect_store

    store = PrefixStore(f"tensorflow/{env.restart_count}", connect_store(env, _TIMEOUT))
    keys = [str(rank) for rank in range(env.size)]
    store.set(keys[env.rank], own)
    try:
        store.wait(keys, _TIMEOUT)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise WorldError(
            f"rank {env.rank} waited {_TIMEOUT.total_seconds():g} s for the addresses of "
            f"{env.size} TensorFlow workers; missing: {missing}. Look for their errors."
        ) from error
    return [_checked(rank, value.decode()) for rank, value in enumerate(store.multi_get(keys))]


def _checked(rank: int, text: str) -> str:
    """What came through a store is a stranger's until it is known to be an address."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[\w.:%\[\]-]+", host) or not port.isdecimal() or int(port) > 65535:
        raise WorldError(f"rank {rank} gave {text!r} as its address: it must be host:port.")
    return text


def _check_reachable(env: Environment, workers: Sequence[str]) -> None:
    if env.nodes == 1:
        return
    for rank, worker in enumerate(workers):
        if is_loopback(worker.rpartition(":")[0]):
            raise WorldError(
                f"the TensorFlow worker of rank {rank} is at {worker}, which means another "
                f"machine on each of the {env.nodes}: the address of its host was not found. Set "
                f"{HOST} there to the address at which the others reach it."
            )


def _address_of_interface(name: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asked = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, asked)
        return socket.inet_ntoa(answer[20:24])
    return None


def _address_towards(host: str) -> str | None:
    """This machine's address on the way to ``host``; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as asking:
                asking.connect(where)
                return str(asking.getsockname()[0])
    return None


def _bracketed(address: str) -> str:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address.partition("%")[0]).version == 6:
            return f"[{address}]"
    return address
