"""What a user says of the wire between ranks, and what is known of it: plain data, no torch."""

from paceline.wire.compression import Compression, Form
from paceline.wire.local_steps import LocalSteps
from paceline.wire.reduction import Reduction

__all__ = ["Compression", "Form", "LocalSteps", "Reduction"]
