"""``deepspeed.ops``: its optimizers, which are torch's here."""

from paceline.compat.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]
