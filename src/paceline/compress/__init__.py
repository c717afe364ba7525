"""What goes over the wire: gradients in fewer bytes, with what was left behind sent later."""

from paceline.compress.options import Compression, Form

__all__ = ["Compression", "Form"]
