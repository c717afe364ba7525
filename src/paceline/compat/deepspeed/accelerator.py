"""``deepspeed.accelerator``: ``get_accelerator()``, the kind of device that ranks compute on."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.world import World

_ON_DEVICE = (
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "initial_seed",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "seed",
    "set_rng_state",
    "stream",
    "synchronize",
)
"""What ``torch.cuda``, or the module of another kind of device, has under the same name."""
_ON_CPU = {"get_rng_state", "initial_seed", "manual_seed", "seed", "set_rng_state"}
"""Those of them that torch itself has for the CPU."""
_NOTHING_ON_CPU: dict[str, Any] = {
    "empty_cache": None,
    "get_device_name": "cpu",
    "ipc_collect": None,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "memory_stats": {},
    "memory_summary": "",
    "reset_peak_memory_stats": None,
    "synchronize": None,
}
"""Those that have nothing to do, or to count, on the CPU."""


class TorchAccelerator:
    """The questions that DeepSpeed's scripts ask of a device, answered by torch."""

    @property
    def _name(self) -> str:
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, or ``cuda:1`` with an index; ``cpu`` either way."""
        if device_index is None or self._name == "cpu":
            return self._name
        return f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which tensors are made on that device."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Nothing on CPUs; elsewhere the device of this process."""
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int | str:
        """The index of this process' device, or ``cpu``."""
        return "cpu" if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Such as ``cuda:1``, or ``cpu``."""
        if self._name == "cpu":
            return "cpu"
        return self.device_name(torch.accelerator.current_device_index())

    def device_count(self) -> int:
        """Devices of this machine; on CPUs, the ranks on it."""
        if self._name != "cpu":
            return torch.accelerator.device_count()
        world = World.joined()
        return 1 if world is None else world.local_size

    def is_available(self) -> bool:
        """Whether there is a device: a CPU always is."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether there is nothing to wait for: on CPUs."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """What ranks talk by."""
        return {"cuda": "nccl", "xpu": "xccl"}.get(self._name, "gloo")

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 can be computed in."""
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether float16 can be computed in."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The number formats of models."""
        low = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *low]

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on this kind of device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A copy that devices read faster; the tensor itself on CPUs."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, or of this machine."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._module.get_device_properties(device_index).total_memory)

    @property
    def _module(self) -> Any:
        return torch if self._name == "cpu" else getattr(torch, self._name)

    def __getattr__(self, name: str) -> Any:
        if name in _ON_DEVICE:
            if self._name != "cpu" or name in _ON_CPU:
                return getattr(self._module, name)
            if name == "manual_seed_all":
                return torch.manual_seed
            if name in _NOTHING_ON_CPU:
                return lambda *_, **__: _NOTHING_ON_CPU[name]
        raise AttributeError(
            f"get_accelerator().{name} is not there. Use torch.accelerator, or torch.{self._name}."
        )


@cache
def get_accelerator() -> TorchAccelerator:
    """The kind of device that torch finds here: GPUs, or else CPUs."""
    return TorchAccelerator()


def set_accelerator(accelerator: Any) -> None:
    """Refused: torch says what there is."""
    raise TrainingError(
        "deepspeed.accelerator.set_accelerator: torch says what devices there are. Leave it out; "
        "hide GPUs with CUDA_VISIBLE_DEVICES= instead."
    )
