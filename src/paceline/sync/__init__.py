"""How replicas agree on a model: one protocol, and the ways to do it.

``protocol.py`` is what an optimizer step asks of any of them. ``plain.py`` averages gradients in
every step, by DDP or FSDP themselves, in two levels (``hierarchical.py``) or in fewer bytes
(``compressed/``). ``local_sgd.py`` lets replicas train alone and average now and then (DiLoCo).
"""
