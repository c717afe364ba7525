"""How tensor parallelism is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.options.arguments import documented
from paceline.options.declare import Option, check


@documented
@dataclass(frozen=True)
class TensorParallel:
    """How the ``tp`` ranks of a layout share a model's layers; see docs/guides/tensor.md."""

    config_section: ClassVar[str] = "tensor"

    plan: Annotated[
        Literal["auto"] | Mapping[str, str],
        Option(
            "A mapping from name patterns to roles, such as {'*.mlp.up': 'column', '*.mlp.out': "
            "'row'}; what no pattern names stays whole on every rank. auto: a Hugging Face model's "
            "own plan where it has one, else one that is found by following the data.",
            must="'auto' or a dict from name patterns to roles such as 'column' and 'row'",
        ),
    ] = "auto"
    sequence: Annotated[
        bool,
        Option("Split the activations between the split layers along the sequence, too."),
    ] = False
    vocabulary: Annotated[
        bool,
        Option(
            "Split the embedding, the output layer and the cross-entropy along the vocabulary. "
            "For plans that are found automatically."
        ),
    ] = True

    def __post_init__(self) -> None:
        check(self, "tensor: ")
