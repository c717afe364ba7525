"""What a user says of the wire."""

from paceline.wire.compression import Compression, Form

__all__ = ["Compression", "Form"]
