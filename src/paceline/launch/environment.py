"""What a launcher told this process about its place: the torchrun variables, read and checked.

``RANK`` and ``WORLD_SIZE`` decide: with neither (and no ``LOCAL_RANK``) the process stands alone.
No torch here, so that a command line can ask the question in a blink.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import WorldError
from paceline.launch.listening import is_loopback

# Any of these says that a launcher started this process. MASTER_ADDR alone does not: it is an
# address that clusters export everywhere, not a place in a world.
_MEMBERSHIP = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
"""How many collectives torch remembers; it looks before the first process group is made."""
COLLECTIVES_REMEMBERED = 256
_NEXT_STEP = (
    "Start the script with torchrun or `paceline train --script`, or unset these variables."
)


@dataclass(frozen=True)
class Environment:
    """The place of one process: its rank among ``size``, its node, and where ranks meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    address: str | None
    """``MASTER_ADDR``; ``None`` only for a single rank that was given no address."""
    port: int | None
    restart_count: int
    """How often the elastic agent has restarted this world (``TORCHELASTIC_RESTART_COUNT``)."""
    store_is_hosted: bool
    """The launcher already serves the store at ``address:port``; no rank has to."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment | None:
    """The place a launcher gave this process, or ``None`` when no launcher started it.

    A partial or contradictory set raises :class:`~paceline.errors.WorldError` naming the variables.

    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` may be left out when they follow from the rest: by
    ``rank modulo LOCAL_WORLD_SIZE`` when only the size is given, and ``rank`` itself when the
    ranks meet on this machine (``MASTER_ADDR`` is localhost). Otherwise they must be set: guessing
    wrong would put several ranks on one GPU.
    """
    env = os.environ if environ is None else environ
    found = [name for name in _MEMBERSHIP if name in env]
    if not found:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in found)
        raise WorldError(f"{present} is set but {' and '.join(missing)} is not. {_NEXT_STEP}")
    size = _number(env, "WORLD_SIZE", minimum=1)
    rank = _number(env, "RANK")
    _below("RANK", rank, "WORLD_SIZE", size)
    address, port = _rendezvous(env, size)
    local_rank, local_size = _local(env, rank, size, address)
    nodes = _number(env, "GROUP_WORLD_SIZE", minimum=1, default=-(-size // local_size))
    node = _number(env, "GROUP_RANK", default=rank // local_size)
    _below("GROUP_RANK", node, "GROUP_WORLD_SIZE", nodes)
    return Environment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=address,
        port=port,
        restart_count=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _rendezvous(env: Mapping[str, str], size: int) -> tuple[str | None, int | None]:
    """Where ranks meet; a single rank without an address needs no meeting place."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if not missing:
        port = _number(env, "MASTER_PORT", minimum=1)
        if port > 65535:
            raise WorldError(f"MASTER_PORT={port} is not a port: it must be from 1 to 65535.")
        return env["MASTER_ADDR"], port
    if size == 1:
        return None, None
    raise WorldError(
        f"WORLD_SIZE={size} but {' and '.join(missing)} is not set: {size} ranks need the host "
        f"name and a free port of rank 0 to meet. {_NEXT_STEP}"
    )


def _local(env: Mapping[str, str], rank: int, size: int, address: str | None) -> tuple[int, int]:
    """Rank and number of ranks on this machine, by the rule in :func:`read_environment`."""
    one_machine = size == 1 or (address is not None and is_loopback(address))
    if "LOCAL_WORLD_SIZE" in env:
        local_size = _number(env, "LOCAL_WORLD_SIZE", minimum=1)
    elif one_machine:
        local_size = size
    else:
        raise WorldError(
            f"LOCAL_WORLD_SIZE is not set, and MASTER_ADDR={address} is another machine's address, "
            f"so how many of the {size} ranks run on this one is unknown. Set LOCAL_WORLD_SIZE "
            "(and LOCAL_RANK) on every rank; torchrun and paceline do."
        )
    if local_size > size:
        raise WorldError(
            f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}: one machine cannot "
            "hold more ranks than the world."
        )
    local_rank = _number(env, "LOCAL_RANK", default=rank % local_size)
    _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return local_rank, local_size


def _number(
    env: Mapping[str, str], name: str, *, minimum: int = 0, default: int | None = None
) -> int:
    if name not in env and default is not None:
        return default
    text = env[name]
    try:
        value = int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number. {_NEXT_STEP}") from None
    if value < minimum:
        raise WorldError(f"{name}={value} must be {minimum} or more. {_NEXT_STEP}")
    return value


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise WorldError(
            f"{name}={value} with {limit_name}={limit}: {name} counts from 0 and must be below "
            f"{limit_name}. {_NEXT_STEP}"
        )
