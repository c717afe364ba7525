"""How losses are scaled with fp16, so that small gradients do not vanish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.options.arguments import documented
from paceline.options.declare import Option, check


@documented
@dataclass(frozen=True)
class LossScaling:
    """The gradient scaler of ``precision="fp16"``; the names and defaults are torch's."""

    config_section: ClassVar[str] = "loss_scaling"

    init_scale: Annotated[
        float, Option("What losses are multiplied by at first.", gt=0, must="a number above 0")
    ] = 65536.0
    growth_factor: Annotated[
        float,
        Option("What the scale is multiplied by when it grows.", gt=1, must="a number above 1"),
    ] = 2.0
    backoff_factor: Annotated[
        float,
        Option(
            "What the scale is multiplied by after an overflow, whose step is left out.",
            gt=0,
            lt=1,
            must="a number between 0 and 1",
        ),
    ] = 0.5
    growth_interval: Annotated[
        int, Option("Steps without an overflow after which the scale grows.", ge=1)
    ] = 2000

    def __post_init__(self) -> None:
        check(self, "loss_scaling: ")
