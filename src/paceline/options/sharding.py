"""How ``zero`` shards a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from paceline.errors import LayoutError, TrainingError
from paceline.formatting import one_of
from paceline.options.arguments import documented
from paceline.options.declare import Option, check, declared

STAGES = (1, 2, 3)


@documented
@dataclass(frozen=True)
class Sharding:
    """How ``zero=1``, ``2`` and ``3`` cut a model; see docs/guides/sharding.md."""

    config_section: ClassVar[str] = "sharding"

    units: Annotated[
        str | Sequence[str] | int | Callable[[str, Any], bool] | None,
        Option(
            "Which modules are gathered one by one: patterns on their names such as 'layers.*', or "
            "a number: modules of at least so many parameters. In Python also a function (name, "
            "module) -> bool. None: the model's repeated blocks.",
            ge=1,
            must="a pattern on module names such as 'layers.*', a list of them, a number of "
            "parameters, or a function (name, module) -> bool",
        ),
    ] = None
    reshard: Annotated[
        bool | int | None,
        Option(
            "With zero=3: whether a unit frees its gathered parameters between forward and "
            "backward. A number keeps them sharded over that many ranks in between. None: "
            "yes.",
            ge=2,
            must="True, False, or a number of ranks from 2 up over which parameters stay cut "
            "between forward and backward",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp16"] | None,
        Option(
            "Gather and compute parameters in this format. The optimizer holds them in float32, "
            "and gradients are summed in float32.",
        ),
    ] = None
    offload: Annotated[
        Literal["parameters", "optimizer"] | None,
        Option(
            "What is kept in CPU memory: parameters (with their gradients and the optimizer "
            "state), or optimizer, that state alone.",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self, "sharding: ")
        if self.units == "" or (isinstance(self.units, list | tuple) and "" in self.units):
            words = declared(Sharding)["units"].must_be
            raise TrainingError(f"sharding: units={self.units!r} must be {words}.")

    def check(self, stage: int, shards: int, zero_bubble: bool = False) -> None:
        """Refuse what ``zero=stage`` over ``shards`` ranks cannot do."""
        if stage not in STAGES:
            raise LayoutError(f"sharding: zero={stage} must be {one_of(STAGES)}.")
        if self.reshard is not None and stage != 3:
            raise TrainingError(
                f"sharding: reshard={self.reshard!r} needs zero=3. With zero={stage} parameters "
                "stay gathered for a whole step, which is what sets it apart. Leave reshard out."
            )
        if self.reshard not in (None, False) and zero_bubble:
            raise TrainingError(
                f"sharding: reshard={self.reshard!r} does not go with a zero-bubble schedule, "
                "which computes the gradients of the parameters long after those of the inputs. "
                "Leave reshard out."
            )
        if self.reshard in (None, True, False):
            return
        assert self.reshard is not None
        if self.reshard >= shards or shards % self.reshard:
            raise TrainingError(
                f"sharding: reshard={self.reshard} must divide the {shards} ranks that share a "
                "copy of the parameters, and be less than that."
            )
