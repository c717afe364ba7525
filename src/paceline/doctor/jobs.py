"""What the doctor's helper process can be asked to do; each job runs in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_FIRST_ELEMENTS = 16 * 1024
_MOST_ELEMENTS = 16 * 1024 * 1024
_AIM_S = 0.1
_REPEATS = 3
_EMPTY_REPEATS = 20


def collective(
    *,
    backend: str,
    rank: int,
    size: int,
    store: dict[str, Any],
    prefix: str,
    patience_s: float,
    device: str = "cpu",
    interface: str = "",
) -> dict[str, Any]:
    """Measure all-reduces as ``rank`` of ``size``: bytes a second, and seconds for an empty one.

    ``store`` is ``{"file": PATH}`` on one machine, else ``{"host": HOST, "port": PORT}``.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    patience = timedelta(seconds=patience_s)
    where: Any
    if "file" in store:
        where = dist.FileStore(store["file"], size)  # type: ignore[attr-defined]
    else:
        where = dist.TCPStore(  # type: ignore[attr-defined]
            store["host"], store["port"], is_master=False, timeout=patience, wait_for_workers=False
        )
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, where),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=patience,
    )
    latency = min(_all_reduce(torch.zeros(1, device=device)) for _ in range(_EMPTY_REPEATS))
    count = _worthwhile_size(device)
    data = torch.ones(count, device=device)
    fastest = min(_all_reduce(data) for _ in range(_REPEATS))
    dist.barrier()  # nobody leaves while another is in its last all-reduce
    # Of n ranks each gets, and sends, 2 (n - 1) / n of the data: for two, all of it.
    share = 2 * (size - 1) / size if size > 1 else 1.0
    return {"rate": share * data.nbytes / fastest, "latency": latency}


def _worthwhile_size(device: str) -> int:
    """Elements whose all-reduce takes about a tenth of a second; the same on every rank."""
    small = torch.ones(_FIRST_ELEMENTS, device=device)
    _all_reduce(small)
    taken = torch.tensor([min(_all_reduce(small) for _ in range(_REPEATS))], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    wanted = int(_FIRST_ELEMENTS * _AIM_S / max(float(taken), 1e-6))
    return min(max(wanted, _FIRST_ELEMENTS), _MOST_ELEMENTS)


def _all_reduce(data: torch.Tensor) -> float:
    begin = time.perf_counter()
    dist.all_reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def visit(*, host: str, port: int, keys: dict[str, str], patience_s: float) -> dict[str, Any]:
    """Which of ``keys``, by name, the store that is served there has; waits for one a while.

    What listens there may be no store at all; torch 2.13 then waits for its answer without end.
    """
    deadline = time.monotonic() + patience_s
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=timedelta(seconds=patience_s), wait_for_workers=False
    )
    while True:
        found = next((name for name, key in keys.items() if store.check([key])), None)
        if found is not None or time.monotonic() > deadline:
            return {"found": found}
        time.sleep(0.05)


def model_size(*, config: str) -> dict[str, Any]:
    """Count what the model and the optimizer of a config (as YAML) hold, without their values."""
    import tempfile
    from pathlib import Path

    from paceline.config import load
    from paceline.trainer.config_parts import make_optimizer
    from paceline.trainer.run import make_model

    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config, encoding="utf-8")
        loaded = load(path)
    with torch.device("meta"):
        model = make_model(loaded)
    parameters = list(model.parameters())
    tensors = {id(t): t for t in (*parameters, *model.buffers())}
    counted = {
        "parameters": sum(p.numel() for p in parameters),
        "model_bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
    # Only now: where a model holds values of its own, its optimizer must not step on them.
    on_meta = model.to("meta")
    optimizer = make_optimizer(loaded, on_meta)
    return {**counted, "optimizer_bytes": _state_bytes(optimizer)}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer keeps once it has made a step; made on the meta device, it is free."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "collective": collective,
    "model_size": model_size,
    "visit": visit,
}
