"""Random numbers drawn while samples are fetched, kept apart from those the model draws.

Datasets augment with the process-wide generators of torch (CPU), Python and NumPy. Left alone, what
they draw depends on the rank, the worker and everything drawn before. Here each sample gets
generators seeded for it alone, and the caller's are put back afterwards.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

T = TypeVar("T")


def seed_for(*parts: int) -> int:
    """A 64-bit seed that depends on every part, in order."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def numpy_random() -> Any | None:
    """``numpy.random`` if something in this process has imported it; NumPy is not required."""
    return sys.modules.get("numpy.random")


def seed_all(seed: int) -> None:
    """Seed torch's CPU generator, Python's and (where loaded) NumPy's.

    Not ``torch.manual_seed``: that would seed the GPUs as well, and so change the model's dropout.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := numpy_random()) is not None:
        numpy.seed(seed & 0xFFFFFFFF)


@contextmanager
def isolated(*, in_workers: bool = False) -> Iterator[None]:
    """Leave the caller's generators as they were, whatever is drawn or seeded inside.

    A loader worker has no caller to protect: there nothing is saved, unless ``in_workers``.
    """
    if get_worker_info() is not None and not in_workers:
        yield
        return
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy = numpy_random()
    if numpy is not None:
        numpy_state = numpy.get_state(legacy=False)
        numpy_source = numpy.get_bit_generator()
        if type(numpy_source) is not numpy.MT19937:  # the only kind that numpy.random.seed takes
            numpy.set_bit_generator(numpy.MT19937(0))
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            if numpy.get_bit_generator() is not numpy_source:
                numpy.set_bit_generator(numpy_source)
            numpy.set_state(numpy_state)


Numbers = tuple[int, int, int]


def next_numbers() -> Numbers:
    """Draw from each generator: equal numbers tell that nothing was drawn since it was seeded."""
    numpy = numpy_random()
    return (
        int(torch.empty((), dtype=torch.int64).random_().item()),
        random.getrandbits(64),
        -1 if numpy is None else int.from_bytes(numpy.bytes(8), "little"),
    )


class RandomStream:
    """Generators that go on from call to call, seeded once: for what is read in sequence.

    A stream that shuffles with the process-wide generators so gives the same on every rank,
    whatever each rank's own generators hold.
    """

    def __init__(self, seed: int) -> None:
        if "numpy" in sys.modules:  # or its first use inside the stream would come too late to seed
            importlib.import_module("numpy.random")
        with isolated():
            seed_all(seed)
            self._state = _capture()

    def run(self, call: Callable[[], T]) -> T:
        """``call()`` on these generators; the caller's are left as they were."""
        with isolated():
            _install(self._state)
            try:
                return call()
            finally:
                self._state = _capture()

    def state(self) -> dict[str, Any]:
        """Where the generators stand: tensors, tuples and numbers only."""
        return dict(self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave, here or in another process."""
        self._state = dict(state)


def _capture() -> dict[str, Any]:
    state = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    if (numpy := numpy_random()) is not None:
        full = numpy.get_state(legacy=False)
        state["numpy"] = (
            torch.tensor(full["state"]["key"].tolist(), dtype=torch.int64),
            int(full["state"]["pos"]),
            int(full["has_gauss"]),
            float(full["gauss"]),
        )
    return state


def _install(state: dict[str, Any]) -> None:
    torch.default_generator.set_state(state["torch"])
    random.setstate(state["python"])
    if (numpy := numpy_random()) is not None and "numpy" in state:
        key, position, has_gauss, gauss = state["numpy"]
        numpy.set_state(("MT19937", key.numpy().astype("uint32"), position, has_gauss, gauss))
