"""What is meant by names for spreading a run: ranks, machines, precision and sharding."""

from __future__ import annotations

from paceline.options.habits.meanings import Meaning

_FIT = "trainer.fit(train, epochs=3"


def _layout(says: str, layout: str, note: str = "") -> Meaning:
    """What is said by a layout."""
    dp = f"dp=2,{layout}"
    return Meaning(
        says,
        f"paceline.Trainer(model, ..., layout='{dp}')",
        "layout",
        layout,
        note,
        f"--layout {layout}",
        {
            "Engine": f"paceline.Engine(model, ..., layout='{dp}')",
            "prepare": f"paceline.prepare(model, optimizer, loader, layout='{dp}')",
            "loader": "paceline.loader(dataset, global_batch=32, layout=engine.layout)",
        },
    )


def _precision(says: str, precision: str) -> Meaning:
    return Meaning(
        says,
        f"paceline.Trainer(model, ..., precision='{precision}')",
        "precision",
        precision,
        at={
            "Engine": f"paceline.Engine(model, ..., precision='{precision}')",
            "prepare": f"paceline.Accelerator(precision='{precision}'), with its own prepare",
        },
    )


SPREADING: dict[str, Meaning] = {
    "nproc": Meaning(
        "How many ranks there are is said where they are started",
        f"{_FIT}, nproc=4), or paceline train --script train.py --nproc 4",
        "launch.nproc",
        "4",
        "how many ranks on each machine",
        "--nproc 4",
        {"fit": f"{_FIT}, nproc=4)"},
    ),
    "nnodes": Meaning(
        "How many machines there are is said where ranks are started",
        "paceline train --script train.py --nnodes 2 --rdzv node0:29400",
        "launch.nnodes",
        "2",
        cli="--nnodes 2 --rdzv node0:29400",
    ),
    "rdzv": Meaning(
        "Where machines meet is said where ranks are started",
        "paceline train --script train.py --nnodes 2 --rdzv node0:29400",
        "launch.rdzv",
        "node0:29400",
        "HOST:PORT",
        "--nnodes 2 --rdzv node0:29400",
    ),
    "rank": Meaning(
        "Which rank a process is, its world knows",
        "paceline.World.current().rank, and .local_rank on its machine",
    ),
    "device": Meaning(
        "Ranks use the GPUs that they find, else the CPU",
        "paceline.World.current().device (with CUDA_VISIBLE_DEVICES= in the environment, the CPU)",
        "launch.device",
        "cpu",
        "auto, cpu or cuda",
    ),
    "backend": Meaning(
        "Ranks talk over NCCL on GPUs and over Gloo on CPUs",
        "paceline.World.current().info()",
        "launch.device",
        "cpu",
        "cpu or cuda: ranks talk over Gloo on CPUs, over NCCL on GPUs",
    ),
    "timeout": Meaning(
        "The seconds that a rank waits for others are timeout",
        "paceline.Trainer(model, ..., timeout=600)",
        "launch.timeout",
        "600",
        at={"Engine": "paceline.World.init(timeout=600)"},
    ),
    "restarts": Meaning(
        "How often failed ranks are started again is max_restarts",
        f"{_FIT}, nproc=4, max_restarts=3)",
        "launch.max_restarts",
        "3",
        cli="--max-restarts 3",
    ),
    "launcher": Meaning(
        "Where ranks run is said where they are started",
        "paceline.launch('train.py', on='ray', nproc=4)",
        "launch.on",
        "ray",
        cli="--on ray",
    ),
    "worker_resources": Meaning(
        "What Ray gives each worker is a setting of its launcher",
        "paceline.launch('train.py', on='ray', nproc=4, settings={'launch.ray.cpus_per_worker': "
        "2})",
        "launch.ray.cpus_per_worker",
        "2",
    ),
    "placement": Meaning(
        "Where Ray puts workers is a setting of its launcher",
        "paceline.launch('train.py', on='ray', nproc=4, settings={'launch.ray.placement': "
        "'SPREAD'})",
        "launch.ray.placement",
        "SPREAD",
    ),
    "env": Meaning(
        "Variables for the ranks are settings of the launch",
        "paceline.launch('train.py', on='ray', nproc=4, settings={'launch.env': {'A': 'b'}})",
        "launch.env",
        "{A: b}",
    ),
    "function": Meaning(
        "A function that every rank calls is launched", "paceline.launch(train, config, nproc=4)"
    ),
    "precision": _precision(
        "Mixed precision is precision, which is 'bf16', 'fp16' or 'fp32'", "bf16"
    ),
    "fp16": _precision("Mixed precision in fp16, with a gradient scaler, is precision", "fp16"),
    "fp64": _precision("The precision of the whole model is precision", "fp64"),
    "loss_scale": _precision("The gradient scaler comes with precision", "fp16"),
    "strategy": _layout(
        "How a model is spread is its layout ('dp=2' is DDP, 'dp=2,zero=3' is FSDP)",
        "zero=3",
        "ddp: auto; fsdp: zero=3; deepspeed: zero=1, zero=2 or zero=3 for its stages",
    ),
    "fsdp": _layout("FSDP is a layout with zero=3", "zero=3"),
    "zero": _layout(
        "ZeRO's stages are zero=1, zero=2 and zero=3 of the layout",
        "zero=2",
        "ZeRO's stages are zero=1, zero=2 and zero=3",
    ),
    "tp": _layout("Tensor parallelism is a layout with tp", "tp=2"),
    "pp": _layout("Pipeline parallelism is a layout with pp", "pp=2"),
    "unused_parameters": Meaning("Leave it out, as parameters without a gradient are found"),
    "ddp_detail": Meaning(
        "Leave it out, as gradients are weighted by samples and are views of their buckets, and "
        "buffers are those of rank 0"
    ),
    "bucket": Meaning(
        "The size of a bucket of gradients is Reduction(bucket_mib=)",
        "paceline.Trainer(model, ..., reduction=paceline.Reduction(bucket_mib=25))",
        "reduction.bucket_mib",
        "25",
        at={"Engine": "paceline.Engine(model, ..., reduction=paceline.Reduction(bucket_mib=25))"},
    ),
    "overlap": Meaning(
        "Gradients are sent during the backward pass unless Reduction(overlap=False)",
        "paceline.Trainer(model, ..., reduction=paceline.Reduction(overlap=False))",
        "reduction.overlap",
        "false",
        at={"Engine": "paceline.Engine(model, ..., reduction=paceline.Reduction(overlap=False))"},
    ),
    "compress": Meaning(
        "The format in which gradients are sent is compress",
        "paceline.Trainer(model, ..., compress='fp16')",
        "compress.format",
        "fp16",
        at={"Engine": "paceline.Engine(model, ..., compress='fp16')"},
    ),
    "local_steps": Meaning(
        "Steps without synchronising are local_steps",
        "paceline.Trainer(model, ..., local_steps=8)",
        "local_steps.every",
        "8",
        at={"Engine": "paceline.Engine(model, ..., local_steps=8)"},
    ),
    "offload": Meaning(
        "What a sharded model keeps on the CPU is Sharding(offload=)",
        "paceline.Trainer(model, ..., layout='dp=2,zero=3', "
        "sharding=paceline.Sharding(offload='parameters'))",
        "sharding.offload",
        "parameters",
    ),
    "wrapping": Meaning(
        "Which modules are sharded by themselves is Sharding(units=)",
        "paceline.Trainer(model, ..., layout='dp=2,zero=3', "
        "sharding=paceline.Sharding(units='layers.*'))",
        "sharding.units",
        "layers.*",
    ),
    "reshard": Meaning(
        "Whether parameters are given back after the forward pass is Sharding(reshard=)",
        "paceline.Trainer(model, ..., layout='dp=2,zero=3', "
        "sharding=paceline.Sharding(reshard=False))",
        "sharding.reshard",
        "false",
    ),
    "device_map": Meaning(
        "Parts of a model on several devices of one process are device_map",
        "paceline.Trainer(model, ..., device_map='auto')",
        "device_map",
        "auto",
        at={"Engine": "paceline.Engine(model, ..., device_map='auto')"},
    ),
    "plugin": Meaning(
        "There are no plugins, and what they set is an argument of its own",
        "paceline.Trainer(model, ..., layout='dp=2,zero=3', precision='bf16')",
        at={
            "Engine": "paceline.Engine(model, ..., layout='dp=2,zero=3', precision='bf16')",
            "prepare": "paceline.prepare(model, optimizer, loader, layout='dp=2,zero=3')",
        },
    ),
    "arguments": Meaning(
        "There is no object of arguments, they are given to the Trainer and to fit",
        "paceline.Trainer(model, optimizer=optimizer, loss=loss, global_batch=32)",
    ),
    "not_here": Meaning(
        "There is nothing like it here; leave it out, or do it in a callback or in a loop of your "
        "own",
        "paceline.Trainer(model, ..., callbacks=[MyCallback()])",
    ),
    "max_time": Meaning(
        "A run ends by epochs or steps, or when a callback asks for it",
        "trainer.stop('time is up')",
    ),
}
