"""The names and shapes of a model's tensors, from before it is spread."""

from __future__ import annotations

from torch import Tensor, nn

from paceline.engine.peft_adapters import describe_adapters, names_before_adapters


class WholeModel:
    """What the whole model saves, whichever rank holds it later.

    A tied weight has several names; whoever spreads it keeps it under the first.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        self.saved = {n: tuple(v.shape) for n, v in saved.items() if isinstance(v, Tensor)}
        """The shapes of all parameters and persistent buffers."""
        first: dict[int, str] = {}
        self.first_saved = {
            name: first.setdefault(id(value), name)
            for name, value in saved.items()
            if isinstance(value, nn.Parameter)
        }
        """By each name under which a parameter is saved: the first of them."""
        self.parameters = {n: tuple(p.shape) for n, p in model.named_parameters()}
        """The shapes of parameters by their first names."""
        named = list(model.named_parameters(remove_duplicate=False))
        first = {}
        for name, parameter in named:
            first.setdefault(id(parameter), name)
        self.aliases = {n: first[id(p)] for n, p in named if n != first[id(p)]}
        """The first name of a parameter by its other ones."""
        self.buffers = {
            name: tuple(value.shape)
            for name, value in saved.items()
            if isinstance(value, Tensor) and id(value) not in first and name not in self.parameters
        }
        """The shapes of persistent buffers."""
        self.has_extra = any(not isinstance(value, Tensor) for value in saved.values())
        """Whether modules save more than tensors (``get_extra_state``)."""
        self.adapters = describe_adapters(model)
        """What each adapter of peft in it is made of."""
        self.before_adapters = names_before_adapters(model)
        """Names of tensors before adapters came; ``None`` for what is an adapter's own."""
