"""The bytes of gradients that a rank has sent, and those it would have sent uncompressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.parallel.dtensor import local

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class Traffic(NamedTuple):
    """Of this rank, since its engine was made.

    Parameters that ``zero`` gathers, and the few bytes of losses and agreements, are not in it.
    """

    sent: int
    """Bytes that really left, as the collectives are known to send them."""
    plain: int
    """What would have left uncompressed, with an exchange after every step."""


def traffic(engine: Engine) -> Traffic | None:
    """Of one engine; ``None`` where gradients go DDP's or FSDP's own way, which is not counted."""
    sent = plain = 0.0
    if engine.wiring is not None:
        sent += engine.wiring.exchange.wire.sent
        plain += engine.wiring.exchange.plain
    if engine.rounds is not None:
        sent += engine.rounds.wire.sent
        plain += engine.rounds.steps_alone * plain_bytes(engine)
    elif engine.wiring is None:
        return None
    return Traffic(round(sent), round(plain))


def sent_in(engine: Engine, step: int) -> str | None:
    """What is sent in step number ``step`` (from 1): see :class:`paceline.events.WireUsed`.

    ``None`` where it is not counted.
    """
    done_before = step - 1
    if engine.rounds is not None and engine.rounds.options.is_alone(done_before):
        return "distances"
    if engine.wiring is None:
        return None
    return "warmup" if done_before < engine.wiring.exchange.options.warmup else "gradients"


class LeftAlone(NamedTuple):
    """A parameter that travels as it is, beside others that are compressed."""

    name: str
    bytes: int
    why: str
    """The option that has it so, or what else does."""


def left_alone(engine: Engine) -> tuple[list[LeftAlone], int]:
    """What of the last step's gradients travelled as it is, and the bytes of all of them.

    Of the tensors on this rank; after a step with compression.
    """
    wiring = engine.wiring
    found, total = [], 0
    if wiring is not None and wiring.compresses:
        for name, parameter in engine._trained():
            # As it travels: what tp cuts in parts, what zero cuts on its way only.
            tensor = local(parameter) if engine.layout.tp > 1 else parameter
            size = tensor.numel() * tensor.element_size()
            total += size
            why = wiring.exchange.why_plain(name, tuple(tensor.shape))
            if why is not None:
                found.append(LeftAlone(name, size, why))
    return found, total


def plain_bytes(engine: Engine) -> float:
    """What an all-reduce of all gradients sends from this rank, in a ring."""
    copies = engine.layout.dp
    trained = (local(p) for p in engine._parameters if p.requires_grad)
    return 2 * (copies - 1) / copies * sum(p.numel() * p.element_size() for p in trained)
