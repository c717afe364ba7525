"""The state of a training script: models, optimizers, samplers and plain objects."""

from __future__ import annotations

import copy
import io
from typing import Any

import cloudpickle
import torch

from paceline.compat.horovod.common.elastic import ObjectState
from paceline.compat.horovod.torch.elastic.sampler import ElasticSampler
from paceline.compat.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.compat.horovod.torch.mpi_ops import rank


class TorchState(ObjectState):
    """The state of a training script.

    ``model`` and ``optimizer`` may be left out; further models, optimizers, samplers and objects
    are given by keyword. All of them become attributes.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler_of(value) for name, value in given.items()}
        self._handlers = {name: h for name, h in handlers.items() if h is not None}
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        objects = {name: v for name, v in given.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)

    def save(self) -> None:
        """Copy everything to memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def saved(self) -> Any:
        """Everything that was saved, of models, optimizers and samplers what they have saved."""
        parts = {name: handler.saved() for name, handler in self._handlers.items()}
        return {**super().saved(), "handlers": parts}

    def take_saved(self, saved: Any) -> None:
        """Take over what an earlier process has saved."""
        for name, part in saved["handlers"].items():
            if name in self._handlers:
                self._handlers[name].take_saved(part)
        super().take_saved(saved)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new model, optimizer or sampler is saved at once."""
        if name != "_handlers" and hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def _agree(self, before: float, latest: float, update: int) -> tuple[float, float, int]:
        """One answer on all ranks: a launcher may have asked any of them to leave."""
        every = allgather_object((latest, update), "elastic.host_updates")
        updates = 0
        for _, theirs in every:
            updates |= theirs
        return before, max(time for time, _ in every), updates

    def _newest_commit(self) -> bytes | None:
        """The newest of all machines; each of them may have lost its last."""
        folder = self._commit_folder
        newest = 0 if folder is None or not folder.writes else folder.newest()
        numbers = allgather_object(newest, "elastic.commits")
        number = max(numbers)
        if number == 0:
            return None
        owner = numbers.index(number)
        if folder is not None:
            folder.number = number
        content = folder.read(number) if folder is not None and rank() == owner else None
        received: bytes = broadcast_object(content, owner, "elastic.commit")
        return received

    def _to_bytes(self, saved: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(saved, buffer, pickle_module=cloudpickle)
        return buffer.getvalue()

    def _from_bytes(self, content: bytes) -> Any:
        # Objects of the script's own classes are among it, which weights_only would refuse.
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


class StateHandler:
    """How one attribute is saved, restored and brought to all ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy it to memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks that of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()

    def saved(self) -> dict[str, Any]:
        """What was saved, as the handler keeps it."""
        return {name: kept for name, kept in vars(self).items() if name != "value"}

    def take_saved(self, saved: dict[str, Any]) -> None:
        """Take over what an earlier process has saved."""
        vars(self).update(saved)


class _StateDictHandler(StateHandler):
    """Handles whatever has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copy the state dict."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load what was copied."""
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handles a model."""

    def sync(self) -> None:
        """Overwrite its parameters and buffers with those of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Handles an optimizer."""

    def sync(self) -> None:
        """Overwrite its state and hyperparameters with those of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """Handles an ``ElasticSampler``."""

    def sync(self) -> None:
        """Take over what rank 0 has counted, and what all ranks have named as seen."""
        own = self.value.state_dict()
        every = allgather_object(own, "elastic.sampler")
        seen = set().union(*(theirs.get("processed_indices", ()) for theirs in every))
        self.value.load_state_dict({**every[0], "processed_indices": seen})


_handler_registry: list[tuple[type[Any], type[Any]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type[Any], type[Any]]]:
    """Which handler is used for which type; the first that fits counts."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type[Any], type[Any]]]) -> None:
    """Use other handlers."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> Any:
    return next(
        (handler(value) for kind, handler in _handler_registry if isinstance(value, kind)), None
    )
