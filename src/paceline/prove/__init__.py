"""The parity prover: a layout computes what one process computes, or here is where it does not."""

from paceline.prove.api import verify, verify_config
from paceline.prove.cases import Case
from paceline.prove.report import LayoutResult, VerifyReport, Where

__all__ = ["Case", "LayoutResult", "VerifyReport", "Where", "verify", "verify_config"]
