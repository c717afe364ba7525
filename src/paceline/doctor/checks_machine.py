"""Judging what each machine has: memory, limits, cores, GPUs, the same software as the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

from paceline.doctor.facts import ClusterFacts, Gpu, Machine, Versions
from paceline.doctor.finding import Finding, failed, ok, warning
from paceline.formatting import binary_size, plural

RANK_BYTES = 300 * 2**20
"""What a rank needs before it holds a model: Python, torch and their buffers, measured on a CPU."""
GPU_RANK_BYTES = 1500 * 2**20
"""The same with CUDA, whose libraries lie in the memory of the machine as well."""
SMALL_SHM = 64 * 2**20
"""What containers get as shared memory when nobody asks for more."""
BUSY_GPU = 0.9
"""A GPU with less than this share of its memory free is in use by somebody."""

_WORDS = {"cuda": "CUDA", "nccl": "NCCL", "python": "Python", "commit": "git commit"}
_FIXES = {
    "config": "Copy the same config to every machine (or keep it in a shared folder), and give "
    "the same --set on each.",
    "commit": "Check out the same commit everywhere (git status, git pull), or start all machines "
    "in one shared folder.",
}


def config(facts: ClusterFacts) -> list[Finding]:
    """What is wrong with the config itself, on any machine."""
    by_problem: dict[str, list[str]] = {}
    for machine in facts.machines:
        for problem in machine.plan.problems:
            by_problem.setdefault(problem, []).append(machine.name)
    source = next((m.plan.source for m in facts.machines if m.plan.source), "")
    if not by_problem:
        return [ok("config", f"{source or 'the demo'}: nothing wrong with it")]
    return [
        failed(
            "config",
            problem if len(names) == len(facts.machines) else f"{', '.join(names)}: {problem}",
            f"Correct it; paceline config check {source}".rstrip() + " says whether all is well.",
        )
        for problem, names in by_problem.items()
    ]


def versions(facts: ClusterFacts) -> list[Finding]:
    """Whether all machines run the same software on the same config."""
    findings = [
        failed(
            "versions",
            f"{machine.name}: torch cannot be used: {machine.versions.torch_error}",
            f"Repair the installation on {machine.name}: python -c 'import torch' shows the error.",
        )
        for machine in facts.machines
        if machine.versions.torch_error
    ]
    for field in fields(Versions):
        if field.name == "torch_error":
            continue
        found: dict[str, list[str]] = {}
        for machine in facts.machines:
            if not machine.versions.torch_error or field.name not in ("torch", "cuda", "nccl"):
                value = getattr(machine.versions, field.name)
                found.setdefault(value, []).append(machine.name)
        if len(found) > 1:
            findings.append(_differing(field.name, found))
    if not findings:
        findings.append(ok("versions", _versions_in_words(facts)))
    return findings


def _differing(name: str, found: dict[str, list[str]]) -> Finding:
    usual = max(found, key=lambda value: len(found[value]))
    text = "; ".join(f"{value or 'none'} on {', '.join(names)}" for value, names in found.items())
    word = _WORDS.get(name, name)
    others = [m for value, names in found.items() if value != usual for m in names]
    fix = _FIXES.get(name, f"Install {word} {usual or '(none)'} on {', '.join(others)} as well.")
    # Patch releases of Python understand each other; torch's, CUDA's and ours need not.
    is_patch = name == "python" and len({value.rpartition(".")[0] for value in found}) == 1
    judge = warning if name in ("commit", "nccl", "cuda") or is_patch else failed
    return judge("versions", f"{word} differs: {text}", fix)


def _versions_in_words(facts: ClusterFacts) -> str:
    one = facts.machines[0].versions
    parts = [f"paceline {one.paceline}", f"torch {one.torch}", f"Python {one.python}"]
    parts += [f"CUDA {one.cuda}"] if one.cuda else []
    parts += [f"NCCL {one.nccl}"] if one.nccl else []
    parts += [f"commit {one.commit}"] if one.commit else []
    equal = f", equal on all {len(facts.machines)}" if len(facts.machines) > 1 else ""
    return ", ".join(parts) + equal


def launcher(facts: ClusterFacts) -> list[Finding]:
    """Which launcher a script that is started here would recognise, and by what."""
    findings = []
    for machine in facts.machines:
        by = machine.started_by
        if by.problem:
            fix = (
                "A script that is started in the same way gets this error; paceline train may not."
            )
            findings.append(warning("launcher", f"{machine.name}: {by.problem}", fix))
        elif by.launcher == "none":
            found = f"{machine.name}: none; a script that is started here runs alone"
            findings.append(ok("launcher", found))
        else:
            variables = ", ".join(by.variables)
            found = f"{machine.name}: {by.launcher}, by {variables}: {by.where}"
            findings.append(ok("launcher", found))
    return findings


def cores(facts: ClusterFacts) -> list[Finding]:
    """Whether ranks and their threads have cores to run on."""
    findings = []
    for machine in facts.machines:
        limits, plan = machine.limits, machine.plan
        ranks = f"{machine.name}: {plural(plan.nproc, 'rank')} on {plural(limits.cores, 'core')}"
        if plan.nproc > limits.cores:
            findings.append(
                warning(
                    "cores",
                    f"{ranks}: they take turns",
                    f"Start {limits.cores} or fewer ranks on {machine.name} "
                    f"(--nproc {limits.cores}), or give it more cores.",
                )
            )
        elif limits.threads is not None and plan.nproc * limits.threads > limits.cores:
            per_rank = limits.cores // plan.nproc
            findings.append(
                warning(
                    "cores",
                    f"{ranks}, each with OMP_NUM_THREADS={limits.threads} threads: "
                    f"{plan.nproc * limits.threads} in all, which slow each other down",
                    f"On {machine.name}: unset OMP_NUM_THREADS (Paceline then sets it to "
                    f"{per_rank}), or export OMP_NUM_THREADS={per_rank}",
                )
            )
        else:
            findings.append(ok("cores", ranks))
    return findings


def memory(facts: ClusterFacts) -> list[Finding]:
    """Whether the ranks' memory suffices for what they need at the least."""
    findings = []
    for machine in facts.machines:
        free, limits = machine.limits.memory_free, machine.limits
        if free is None:
            continue
        need = least_memory(machine)
        has = f"{machine.name}: {binary_size(free)} of memory free"
        if limits.memory_group is not None:
            has += f" (its control group may use {binary_size(limits.memory_group)})"
        verb = "needs" if machine.plan.nproc == 1 else "need"
        needs = f"{plural(machine.plan.nproc, 'rank')} {verb} at least {binary_size(need)}"
        if machine.model.error or not machine.model.model_bytes:
            needs += " without their model, whose size is unknown"
        if need > free:
            more = "the container's or the job's limit" if limits.memory_group else "memory"
            findings.append(
                failed(
                    "memory",
                    f"{has}; {needs}",
                    f"Start fewer ranks on {machine.name} (--nproc), shard the state (--set "
                    f"layout=zero=3), or raise {more}.",
                )
            )
        else:
            findings.append(ok("memory", f"{has}; {needs}"))
    return findings


def least_memory(machine: Machine) -> int:
    """Bytes of main memory that the ranks of a machine need at the very least.

    On CPUs parameters, gradients and optimizer state; activations and batches come on top.
    """
    plan, model = machine.plan, machine.model
    if plan.on_gpu:
        return plan.nproc * GPU_RANK_BYTES
    state = 2 * model.model_bytes + model.optimizer_bytes
    return int(plan.nproc * (RANK_BYTES + plan.copies_of_state * state))


def limits(facts: ClusterFacts) -> list[Finding]:
    """Open files, processes, shared memory."""
    findings = []
    for machine in facts.machines:
        problems = [*_files(machine, facts), *_processes(machine), *_shared_memory(machine, facts)]
        findings += problems or [ok("limits", _limits_in_words(machine))]
    return findings


def _files(machine: Machine, facts: ClusterFacts) -> list[Finding]:
    limits, plan = machine.limits, machine.plan
    world = plan.nproc * max(plan.most_nodes, len(facts.machines))
    # Gloo keeps connections to every other rank in each of its groups; each reading process has
    # queues and files of its own.
    need = 256 + 8 * world + 32 * plan.workers
    if limits.files is None or limits.files >= need:
        return []
    hard = limits.files_hard
    fix = f"On {machine.name}, before starting: ulimit -n {max(need, 4096)}"
    if hard is not None and hard < need:
        fix = (
            f"Raise the hard limit on {machine.name} (nofile in /etc/security/limits.conf, or "
            f"LimitNOFILE= of its service): it is {hard}, {need} are needed."
        )
    text = f"{machine.name}: {limits.files} open files a process; {world} ranks need {need}"
    return [failed("limits", text, fix)]


def _processes(machine: Machine) -> list[Finding]:
    limits, plan = machine.limits, machine.plan
    if limits.processes is None:
        return []
    threads = limits.threads or max(1, limits.cores // plan.nproc)
    # A rank's own threads (Gloo, autograd, watch, saver) and those of its readers count as well.
    need = plan.nproc * (16 + threads + 4 * plan.workers)
    left = limits.processes - (limits.processes_used or 0)
    if left >= need:
        return []
    return [
        failed(
            "limits",
            f"{machine.name}: {left} more processes and threads are allowed (of "
            f"{limits.processes}); {plural(plan.nproc, 'rank')} need {need}",
            f"On {machine.name}: ulimit -u {limits.processes + need}, or raise pids.max of its "
            "control group (docker run --pids-limit).",
        )
    ]


def _shared_memory(machine: Machine, facts: ClusterFacts) -> list[Finding]:
    limits, plan, model = machine.limits, machine.plan, machine.model
    if limits.shm_free is None or limits.shm_total is None:
        return []
    grow = (
        f"Give {machine.name} more: mount -o remount,size=50% /dev/shm, or docker run "
        "--shm-size=… / --ipc=host"
    )
    if plan.in_memory and not model.error:
        need = shared_state(machine, len(facts.machines))
        if need > limits.shm_free:
            text = (
                f"{machine.name}: {binary_size(limits.shm_free)} free in /dev/shm; the copies in "
                f"memory (checkpoint.memory_every) need {binary_size(need)}"
            )
            return [failed("limits", text, f"{grow}; or set checkpoint.memory_every=null.")]
    if plan.workers and limits.shm_total <= SMALL_SHM:
        text = (
            f"{machine.name}: /dev/shm has {binary_size(limits.shm_total)}, and "
            f"{plural(plan.nproc * plan.workers, 'reading process', 'reading processes')} "
            "(data.workers) pass batches through it"
        )
        return [warning("limits", text, f"{grow}; or set data.workers=0.")]
    return []


def shared_state(machine: Machine, machines: int) -> int:
    """Bytes of shared memory that the copies in memory take on a machine.

    Two slots of its ranks' shares; with several machines as much again for another one's.
    """
    state = machine.model.model_bytes + machine.model.optimizer_bytes
    return 2 * state if machines == 1 else 4 * state // machines


def _limits_in_words(machine: Machine) -> str:
    limits = machine.limits

    def text(value: int | None) -> str:
        return "unlimited" if value is None else str(value)

    words = f"{machine.name}: {text(limits.files)} open files, {text(limits.processes)} processes"
    if limits.shm_total is not None and limits.shm_free is not None:
        words += (
            f", /dev/shm {binary_size(limits.shm_free)} of {binary_size(limits.shm_total)} free"
        )
    return words


def gpus(facts: ClusterFacts) -> list[Finding]:
    """How many, the same everywhere, free, and healthy; one line where there are none."""
    if not any(m.gpus.visible or m.gpus.devices for m in facts.machines):
        errors = [f"{m.name}: {m.gpus.error}" for m in facts.machines if m.gpus.error]
        if errors:
            return [warning("GPUs", "; ".join(errors), "Run nvidia-smi there; reload the driver.")]
        return [ok("GPUs", "none: ranks run on CPUs, over Gloo")]
    findings = [*_different_gpus(facts)]
    for machine in facts.machines:
        findings += _gpus_of(machine)
    return findings or [ok("GPUs", "; ".join(map(_gpus_in_words, facts.machines)))]


def _different_gpus(facts: ClusterFacts) -> list[Finding]:
    kinds = {m.name: _gpus_in_words(m).partition(": ")[2] for m in facts.machines}
    if len(set(kinds.values())) < 2:
        return []
    usual = Counter(kinds.values()).most_common(1)[0][0]
    odd = ", ".join(name for name, kind in kinds.items() if kind != usual)
    return [
        warning(
            "GPUs",
            "; ".join(f"{name}: {kind}" for name, kind in kinds.items()),
            f"Use machines with the same GPUs, or expect the pace of the slowest: look at {odd} "
            "(CUDA_VISIBLE_DEVICES, nvidia-smi).",
        )
    ]


def _gpus_of(machine: Machine) -> list[Finding]:
    gpus, findings = machine.gpus, list[Finding]()
    plan = machine.plan
    if plan.on_gpu and gpus.visible < (1 if plan.shares_gpu else plan.nproc):
        findings.append(
            failed(
                "GPUs",
                f"{machine.name}: {plural(plan.nproc, 'rank')} on "
                f"{plural(gpus.visible, 'visible GPU')}",
                f"On {machine.name}: --nproc {max(gpus.visible, 1)}, or widen "
                "CUDA_VISIBLE_DEVICES.",
            )
        )
    if not gpus.visible and gpus.devices:
        findings.append(
            warning(
                "GPUs",
                f"{machine.name}: {plural(len(gpus.devices), 'GPU')} present, none that torch "
                "would use",
                f"On {machine.name}: install a torch built for CUDA, or unset an empty "
                "CUDA_VISIBLE_DEVICES.",
            )
        )
    for gpu in gpus.devices:
        findings += _gpu_problems(machine.name, gpu)
    return findings


def _gpu_problems(name: str, gpu: Gpu) -> list[Finding]:
    title, findings = f"{name}: GPU {gpu.index} ({gpu.name})", list[Finding]()
    if gpu.users or gpu.memory_free < BUSY_GPU * gpu.memory_total:
        users = ", ".join(gpu.users) or "by a process that is not shown"
        findings.append(
            warning(
                "GPUs",
                f"{title}: {binary_size(gpu.memory_free)} of {binary_size(gpu.memory_total)} free; "
                f"in use: {users}",
                f"End what uses it on {name} (nvidia-smi lists it), or leave GPU {gpu.index} out "
                "with CUDA_VISIBLE_DEVICES.",
            )
        )
    if gpu.uncorrected_errors:
        errors = plural(gpu.uncorrected_errors, "uncorrected memory error")
        findings.append(
            failed(
                "GPUs",
                f"{title}: {errors} since the driver was loaded",
                f"Drain {name} and reset the GPU (nvidia-smi -r -i {gpu.index}); replace it if "
                "they come back.",
            )
        )
    if gpu.slowed_by:
        findings.append(
            warning(
                "GPUs",
                f"{title}: its clocks are lowered by {gpu.slowed_by}",
                f"Look at cooling and power of {name} (nvidia-smi -q -d PERFORMANCE); every step "
                "waits for it.",
            )
        )
    return findings


def _gpus_in_words(machine: Machine) -> str:
    kinds = Counter(gpu.name for gpu in machine.gpus.devices)
    text = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    return f"{machine.name}: {text or plural(machine.gpus.visible, 'GPU')}"
