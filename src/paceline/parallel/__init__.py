"""The ways of spreading a model, and the order in which they apply.

``apply_layout.py`` orders them and ``distributed_model.py`` is what the engine drives.
``replicate.py`` is data parallelism by DDP, ``averaging.py`` the same where DDP does not apply,
``shard/`` ZeRO by FSDP2, ``tensor/`` and ``pipeline/`` the parallelism of that name,
``device_map/`` a model over several devices of one process. ``recompute.py``, ``offload.py`` and
``meta.py`` save memory.
"""
