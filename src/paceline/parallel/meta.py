"""Values for models that were built on the meta device, piece by piece.

A model built under ``torch.device("meta")`` has shapes and no values. It can be spread as it is;
then ``materialise`` makes its values one block at a time, and each rank keeps its own pieces.
So a model can start that is larger than the memory of any one process.

The values depend on the seed and on the names of modules, never on the layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import TrainingError
from paceline.parallel.broadcast_weights import fingerprint
from paceline.parallel.dtensor import part_of
from paceline.world import rng_state, seed_everything, set_rng_state

Init = Callable[[nn.Module], None]
Share = Callable[[Mapping[str, Tensor]], None]

_UNSET_NUMBER = -(2**7) + 1
"""What integers hold that nobody has set: fits in every signed type."""


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of ``model`` has no values yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def materialise(
    model: nn.Module,
    *,
    seed: int,
    device: torch.device | str,
    init: Init | None = None,
    share: Share | None = None,
    repeatable: bool = False,
) -> None:
    """Give every parameter and buffer of ``model`` that is on the meta device its values, in place.

    ``model`` may be whole, or cut by sharding, tensor and pipeline parallelism: a rank makes the
    whole values of one block at a time and keeps what it holds of them. Tied parameters stay tied.
    Parameters stay the same objects, except in modules that keep weak references to theirs, as
    torch's recurrent ones do.

    Each module is initialised by ``init(module)``; where that leaves something unset, or is not
    given, by the model's own ``_init_weights(module)`` (as Hugging Face's have), and else by the
    module's ``reset_parameters()``. What none of them sets is refused by name: values that a
    constructor computed are lost on the meta device.

    ``share`` is called with the whole values of each block, by name, and may change them: ranks
    whose initialisers draw different numbers take over those of one rank. ``repeatable`` refuses
    an initialiser that gives other values when it is called again from the same seed.
    """
    work = _Materialiser(model, seed, torch.device(device), init, share, repeatable)
    above, blocks = _blocks(model)
    # From the top down, so that what a module does to its parts comes before they are made.
    for name, module in above:
        work.make(name, module, whole=False)
    for name, module in blocks:
        work.make(name, module, whole=True)


def _blocks(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """The parts to make in one go, and the modules above them.

    A part is what a list of modules holds, or a module without such lists. It does not depend on
    the layout: a pipeline stage may hold a list with one block left in it.
    """
    above: list[tuple[str, nn.Module]] = []
    blocks: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(name: str, module: nn.Module, in_list: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_leaf = next(module.children(), None) is None
        if name and (is_leaf or in_list or not _holds_list(module)):
            blocks.append((name, module))
            return
        above.append((name, module))
        is_list = isinstance(module, _LISTS)
        for key, child in module.named_children():
            walk(f"{name}.{key}" if name else key, child, is_list)

    walk("", model, False)
    return above, blocks


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(part, _LISTS) for part in module.modules())


class _TensorSlot(NamedTuple):
    """A place in a module for a parameter or a buffer."""

    owner: nn.Module
    name: str
    is_buffer: bool

    @property
    def tensor(self) -> Any:
        return getattr(self.owner, self.name)

    def put(self, tensor: Tensor) -> None:
        if self.is_buffer:
            self.owner._buffers[self.name] = tensor
        else:
            setattr(self.owner, self.name, tensor)


class _Materialiser:
    def __init__(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        init: Init | None,
        share: Share | None,
        repeatable: bool,
    ) -> None:
        self.model, self.seed, self.device, self.init = model, seed, device, init
        self.share, self.repeatable = share, repeatable
        self.names = {id(module): name for name, module in model.named_modules()}
        self.places: dict[int, list[_TensorSlot]] = {}
        # Tensors are known by what stood in their places at first, whatever is put there later.
        self.owned: dict[int, list[tuple[int, _TensorSlot]]] = {}
        self.meta: dict[int, Tensor] = {}
        self.alive: list[Tensor] = []
        for module in model.modules():
            for slot in _own_slots(module):
                self.places.setdefault(id(slot.tensor), []).append(slot)
                self.owned.setdefault(id(module), []).append((id(slot.tensor), slot))
                self.alive.append(slot.tensor)
                if slot.tensor.is_meta:
                    self.meta[id(slot.tensor)] = slot.tensor

    def make(self, name: str, block: nn.Module, *, whole: bool) -> None:
        """Make the values of ``block``; of it alone where not its ``whole`` is to be made."""
        modules = list(_children_first(block)) if whole else [block]
        held = {key: slot.tensor for m in modules for key, slot in self.owned.get(id(m), ())}
        new = {key: tensor for key, tensor in held.items() if key in self.meta}
        if not new:
            self._move_buffers(modules)
            return
        # What has its values already must keep them, whatever an initialiser does to its module.
        stand_ins = {key: _shape_of(held[key]) for key in held if key not in new}
        try:
            made = self._values(modules, new, stand_ins)
            if self.repeatable:
                marks = {key: fingerprint(tensor) for key, tensor in made.items()}
                made.clear()  # one block at a time is all that a rank holds
                made = self._values(modules, new, stand_ins)
                self._check_repeated(made, marks)
        finally:
            self._put(held)
        if self.share is not None:
            self.share({self._name_of(key): tensor for key, tensor in made.items()})
        for key, tensor in new.items():
            self._keep(tensor, made.pop(key), self.places[key])
            del self.meta[key]
        self._move_buffers(modules)

    def _values(
        self, modules: list[nn.Module], new: dict[int, Tensor], stand_ins: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """The whole values of the tensors ``new``, as the initialisers of ``modules`` set them."""
        full = {key: self._unset(tensor) for key, tensor in new.items()}
        self._put({**full, **stand_ins})
        versions = {key: tensor._version for key, tensor in full.items()}
        for module in modules:
            self._initialise(module, set(full), versions)
        return {key: self.places[key][0].tensor.detach() for key in full}

    def _name_of(self, key: int) -> str:
        slot = self.places[key][0]
        return ".".join(filter(None, (self.names[id(slot.owner)], slot.name)))

    def _check_repeated(self, made: dict[int, Tensor], marks: dict[int, int]) -> None:
        for key, tensor in made.items():
            if fingerprint(tensor) != marks[key]:
                raise TrainingError(
                    f"the model is on the meta device, and {self._name_of(key)} gets other values "
                    "each time it is initialised: its initialiser draws from a generator of its "
                    "own. Pipeline stages are initialised by the ranks that hold them, so draw "
                    "from torch's, numpy's or Python's own generator, which are seeded for each "
                    "module, or build the model on a real device."
                )

    def _unset(self, like: Tensor) -> Tensor:
        """A whole tensor on the device that shows later whether it was set."""
        whole = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if whole.is_floating_point() or whole.is_complex():
            whole.fill_(torch.nan)
        elif whole.dtype != torch.bool:
            whole.fill_(_UNSET_NUMBER % 256 if whole.dtype == torch.uint8 else _UNSET_NUMBER)
        if isinstance(like, nn.Parameter):
            return nn.Parameter(whole, requires_grad=like.requires_grad)
        return whole

    def _put(self, tensors: dict[int, Tensor]) -> None:
        for key, tensor in tensors.items():
            for slot in self.places[key]:
                slot.put(tensor)

    def _initialise(self, module: nn.Module, new: set[int], versions: dict[int, int]) -> None:
        name = self.names[id(module)]
        owns = any(key in new for key, _ in self.owned.get(id(module), ()))
        ways: list[tuple[str, Callable[[], Any]]] = []
        if self.init is not None:
            init = self.init
            ways.append(("init", lambda: init(module)))
        own = self._init_weights_of(name)
        # Without an init, also for modules that own nothing: they may see to their children.
        if own is not None and (owns or self.init is None):
            ways.append(("_init_weights", lambda: own(module)))
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if owns and callable(reset):
            ways.append(("reset_parameters", reset))
        for _, way in ways:
            with self._random(name):
                way()
            if not self._missing(module, new, versions):
                return
        missing = self._missing(module, new, versions)
        if missing:
            raise self._error(module, missing, [what for what, _ in ways])

    def _missing(self, module: nn.Module, new: set[int], versions: dict[int, int]) -> list[str]:
        return [
            slot.name
            for key, slot in self.owned.get(id(module), ())
            if key in new and _is_unset(slot.tensor, versions[key])
        ]

    def _init_weights_of(self, name: str) -> Callable[[nn.Module], Any] | None:
        """The ``_init_weights`` of the nearest module around ``name`` that has one."""
        parts = name.split(".") if name else []
        for length in range(len(parts), -1, -1):
            around = self.model.get_submodule(".".join(parts[:length]))
            found = getattr(around, "_init_weights", None)
            if callable(found):
                return found
        return None

    def _error(self, module: nn.Module, missing: list[str], tried: list[str]) -> TrainingError:
        name = self.names[id(module)]
        what = ", ".join(f"{name}.{own}" if name else own for own in missing)
        did = f"{' and '.join(tried)} did not set it" if tried else "nothing sets it"
        return TrainingError(
            f"the model is on the meta device, and {did}: {what} (in a {type(module).__name__}). "
            "What a constructor computes is lost there. Set it in init(module), or give "
            f"{type(module).__name__} a reset_parameters() that does."
        )

    @contextlib.contextmanager
    def _random(self, name: str) -> Iterator[None]:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        devices = [self.device] if self.device.type == "cuda" else []
        before = rng_state()
        with torch.random.fork_rng(devices=devices), torch.device(self.device):
            seed_everything(int.from_bytes(digest[8:16], "big"))  # numpy's and Python's, too
            torch.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
            try:
                yield
            finally:
                set_rng_state(before)

    def _keep(self, tensor: Tensor, whole: Tensor, slots: list[_TensorSlot]) -> None:
        """Turn ``tensor``, on the meta device, into this rank's part of ``whole``."""
        if slots[0].is_buffer:
            for slot in slots:
                slot.put(whole)
            return
        if isinstance(tensor, DTensor):
            made = torch.empty_like(tensor, device=self.device)
            assert isinstance(made, DTensor)
            made.to_local().copy_(part_of(whole, tensor))
        else:
            made = whole
        parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
        if weakref.getweakrefs(tensor):
            for slot in slots:
                slot.put(parameter)
        else:
            torch.utils.swap_tensors(tensor, parameter)

    def _move_buffers(self, modules: list[nn.Module]) -> None:
        for module in modules:
            for slot in _own_slots(module):
                if slot.is_buffer and not slot.tensor.is_meta:
                    slot.put(slot.tensor.to(self.device))


def _own_slots(module: nn.Module) -> list[_TensorSlot]:
    parameters = [
        _TensorSlot(module, name, False) for name, p in module._parameters.items() if p is not None
    ]
    buffers = [
        _TensorSlot(module, name, True) for name, b in module._buffers.items() if b is not None
    ]
    return parameters + buffers


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        if id(part) in seen:
            return
        seen.add(id(part))
        for child in part.children():
            yield from walk(child)
        yield part

    yield from walk(module)


def _shape_of(tensor: Tensor) -> Tensor:
    stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    return stand_in


def _is_unset(tensor: Tensor, version: int) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype == torch.bool:  # holds no mark: see whether it was written to
        return tensor._version == version
    mark = _UNSET_NUMBER % 256 if tensor.dtype == torch.uint8 else _UNSET_NUMBER
    return tensor.numel() > 0 and bool((tensor == mark).all())
