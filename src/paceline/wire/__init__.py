"""What a user says of the wire between ranks, and what is known of it: plain data, no torch."""

from paceline.wire.compression import Compression, Form

__all__ = ["Compression", "Form"]
