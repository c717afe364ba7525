"""What a run reports when it starts: the format in which gradients are sent, and from when on."""

from __future__ import annotations

from paceline.engine import Engine
from paceline.events import Note
from paceline.formatting import plural
from paceline.options import Compression, LocalSteps


def starting_notes(engine: Engine, last_step: int | None) -> list[Note]:
    """What is on, and a warning where this run, which ends after ``last_step``, is too short."""
    compression, local_steps = engine.options.compress, engine.options.local_steps
    if engine.layout.dp == 1:
        return [] if compression is None else [_alone(compression)]
    notes = []
    start = None if local_steps is None else local_steps.start
    if compression is not None and (start is None or engine.steps_done < start):
        notes.append(of_compression(compression, engine.steps_done, last_step, start))
    if local_steps is not None:
        notes.append(of_local_steps(local_steps, engine.steps_done, last_step))
    return notes


def _alone(compression: Compression) -> Note:
    return Note(
        message=f"gradients would be sent as {compression.formats}, but there is one data-parallel "
        "rank, which has nobody to send them to (compress)"
    )


def of_compression(
    compression: Compression, done: int, last_step: int | None, start: int | None
) -> Note:
    """The format in which gradients are sent; ``start``: of the local steps, in which none are."""
    formats, warmup = compression.formats, compression.warmup
    synchronous = [step for step in (last_step, start) if step is not None]
    if synchronous and min(synchronous) <= warmup and warmup > done:
        over = min(synchronous)
        ends = "local steps begin" if start == over else "this run ends"
        or_else = "raise local_steps.start" if start == over else "train for longer"
        return Note(
            level="warning",
            message=f"no gradient will be sent as {formats}: {ends} after "
            f"{plural(over, 'step')}, and the first {warmup} are uncompressed. Lower "
            f"compress.warmup_steps, or {or_else}",
        )
    if done < warmup:
        then = f" after {plural(warmup, 'uncompressed step')} (compress.warmup_steps)"
    else:
        then = ""
    return Note(message=f"gradients are sent as {formats}{then}")


def of_local_steps(local_steps: LocalSteps, done: int, last_step: int | None) -> Note:
    """How often replicas synchronise."""
    every, start = local_steps.every, local_steps.start
    form = "" if local_steps.exchange == "none" else f", {local_steps.exchange}"
    parts = "" if local_steps.fragments == 1 else f", {local_steps.fragments} fragments in turn"
    told = f"replicas synchronise every {plural(every, 'step')} ({local_steps.method}{form}{parts})"
    if done < start:
        told += f" after {plural(start, 'synchronous step')} (local_steps.start)"
    if last_step is None or last_step - start >= every:
        return Note(message=told)
    if last_step <= start:
        return Note(
            level="warning",
            message=f"no step will be local: this run ends after {plural(last_step, 'step')}, and "
            f"the first {start} are synchronous. Lower local_steps.start, or train for longer",
        )
    last = "they do so" if local_steps.fragments == 1 else "much of the model does so"
    return Note(
        level="warning",
        message=f"{told}, but this run ends after {plural(last_step, 'step')}: {last} only at "
        "its end. Lower local_steps.every, or train for longer",
    )
