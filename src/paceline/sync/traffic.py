"""The bytes of gradients that a rank has sent, and those it would have sent uncompressed."""

from __future__ import annotations

from typing import NamedTuple

from paceline.parallel.dtensor import local
from paceline.sync.averaging import GradientAveraging
from paceline.sync.replica import Replica


class Traffic(NamedTuple):
    """Of this rank, since its engine was made.

    Parameters that ``zero`` gathers, and the few bytes of losses and agreements, are not in it.
    """

    sent: int
    """Bytes that really left, as the collectives are known to send them."""
    plain: int
    """What would have left uncompressed, with an exchange after every step."""


class LeftAlone(NamedTuple):
    """A parameter that travels as it is, beside others that are compressed."""

    name: str
    bytes: int
    why: str
    """The option that has it so, or what else does."""


def left_alone(
    averaging: GradientAveraging | None, replica: Replica
) -> tuple[list[LeftAlone], int]:
    """What of the last step's gradients travelled as it is, and the bytes of all of them.

    Of the tensors on this rank; after a step with compression.
    """
    found, total = [], 0
    if averaging is not None and averaging.compresses:
        for name, parameter in replica.trained():
            # As it travels: what tp cuts in parts, what zero cuts on its way only.
            tensor = local(parameter) if replica.layout.tp > 1 else parameter
            size = tensor.numel() * tensor.element_size()
            total += size
            why = averaging.exchange.why_plain(name, tuple(tensor.shape))
            if why is not None:
                found.append(LeftAlone(name, size, why))
    return found, total


def plain_bytes(replica: Replica) -> float:
    """What an all-reduce of all gradients sends from this rank, in a ring."""
    copies = replica.layout.dp
    trained = (local(p) for p in replica.parameters if p.requires_grad)
    return 2 * (copies - 1) / copies * sum(p.numel() * p.element_size() for p in trained)
