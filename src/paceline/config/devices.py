"""How many GPUs a run on this machine would see, asked of the driver and not of torch."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
from pathlib import Path


def count_gpus() -> int:
    """GPUs that ranks on this machine can use; 0 when torch is built without CUDA.

    Honours ``CUDA_VISIBLE_DEVICES`` the way CUDA does: the list ends at the first entry that
    names no device.
    """
    if not torch_has_cuda():
        return 0
    present = _gpus_present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    count = 0
    for entry in visible.split(","):
        entry = entry.strip()
        named_by_id = entry.startswith(("GPU-", "MIG-"))
        if not named_by_id and not (entry.isdigit() and int(entry) < present):
            break
        count += 1
    return count


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return True  # an unusual build: let torch itself decide later
    for statement in ast.parse(version.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            named = any(isinstance(name, ast.Name) and name.id == "cuda" for name in targets)
            if named and isinstance(statement.value, ast.Constant):
                return statement.value.value is not None
    return True


def _gpus_present() -> int:
    """GPUs the driver lets this process see, by its management library, else by its files."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        folder = Path("/proc/driver/nvidia/gpus")
        return len(list(folder.iterdir())) if folder.is_dir() else 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
