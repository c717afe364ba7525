"""A backward in two halves: first the gradients of a stage's inputs, later those of its parameters.

torch's own split looks at each parameter alone, and goes wrong (an error, or a gradient counted
twice; torch 2.13) where the ways of two parameters meet before they meet the inputs', as in an
encoder–decoder. Here such parameters are found and treated together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from paceline.torch_internals import is_python_node


@dataclass
class _Component:
    """Parameters, and the nodes from which gradients flow to them off the inputs' ways."""

    sources: list[Node] = field(default_factory=list)
    leaves: list[Node] = field(default_factory=list)
    gradients: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


class WeightHalf:
    """What the second half needs of the first."""

    def __init__(self, components: list[_Component], owners: Sequence[Node] = ()) -> None:
        self._components = components
        self._owners = owners

    def run(self) -> None:
        """Add to the gradients of the parameters."""
        for component in self._components:
            _weight_gradients(component)
        self._components, self._owners = [], ()


def backward_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], WeightHalf]:
    """The gradients of ``inputs``, and what is left to do."""
    used = [(i, output) for i, output in enumerate(outputs) if output.requires_grad]
    roots = [output for _, output in used]
    given = [torch.ones_like(o) if gradients is None else gradients[i] for i, o in used]
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    order = _children_first([node for node in map(_node_of, roots) if node is not None])
    components = _find_components(order, roots, wanted)
    if components is None:  # the loss does not depend on the inputs: there is nothing to put off
        torch.autograd.backward(roots, given)
        return (None,) * len(inputs), WeightHalf([])
    handles = [
        node.register_prehook(_keeper(component, node))
        for component in components
        for node in component.sources
    ]
    try:
        found = torch.autograd.grad(roots, wanted, given, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    owners = _owners(order, roots, components)
    for output in outputs:
        output.detach_()  # lets go of what only the inputs' gradients needed
    by_input = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
    return tuple(by_input.get(id(value)) for value in inputs), WeightHalf(components, owners)


def _keeper(component: _Component, node: Node) -> Any:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        component.gradients[node] = gradients

    return keep


def _weight_gradients(component: _Component) -> None:
    edges, gradients = [], []
    for node, given in component.gradients.items():
        for index, gradient in enumerate(given):
            if gradient is not None:
                edges.append(GradientEdge(node, index))
                gradients.append(gradient)
    if not edges:
        return
    handles = []
    if len(component.sources) > 1:
        # What flows from one source to another along the inputs' ways is in its gradient already.
        for node, given in component.gradients.items():
            handles.append(node.register_prehook(lambda _, given=given: given))
    try:
        leaves = tuple(GradientEdge(leaf, 0) for leaf in component.leaves)
        # Kept, since another component may share nodes; it goes with the last reference to it.
        found = torch.autograd.grad(edges, leaves, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(component.leaves, found, strict=True):
        weight: Tensor = leaf.variable  # type: ignore[attr-defined]
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _find_components(
    order: Sequence[Node], roots: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[_Component] | None:
    """The parameters in groups that can be treated alone; ``None`` if no input is reached."""
    tops = [node for node in map(_node_of, roots) if node is not None]
    input_nodes = {_node_of(value) for value in inputs}
    to_input: set[Node] = set()
    to_weight: set[Node] = set()
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if node in input_nodes or any(child in to_input for child in children):
            to_input.add(node)
        if _is_weight(node, input_nodes) or any(child in to_weight for child in children):
            to_weight.add(node)
    if not all(top in to_input for top in tops):
        return None
    groups = _Groups()
    for node in order:
        if node not in to_weight:
            continue
        for child, _ in node.next_functions:
            if child is not None and child in to_weight and child not in to_input:
                groups.join(node, child)  # `node` may be on an input's way: then it is a source
    components: dict[Node, _Component] = {}
    for node in order:
        if not groups.has(node):
            continue
        component = components.setdefault(groups.top(node), _Component())
        if node in to_input:
            component.sources.append(node)
        if _is_weight(node, input_nodes):
            component.leaves.append(node)
    return [c for c in components.values() if c.leaves and c.sources]


def _owners(
    order: Sequence[Node], roots: Sequence[Tensor], components: Sequence[_Component]
) -> list[Node]:
    """Nodes to hold so that all sources stay.

    In torch 2.11 the node of a ``torch.autograd.Function`` goes with the graph above it, whoever
    holds its Python object: one of C++ has to be held, as near above it as there is one.
    """
    lost = {node for c in components for node in c.sources if is_python_node(node)}
    owners: list[Node] = []
    for node in order:
        held = [child for child, _ in node.next_functions if child in lost]
        if not held:
            continue
        lost.difference_update(held)
        if is_python_node(node):
            lost.add(node)
        else:
            owners.append(node)
    with torch.enable_grad():
        above = [root.view_as(root).grad_fn for root in roots if root.grad_fn in lost]
    return owners + [node for node in above if node is not None]


def _is_weight(node: Node, input_nodes: set[Node | None]) -> bool:
    return hasattr(node, "variable") and node not in input_nodes


def _node_of(tensor: Tensor) -> Node | None:
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    # The node that accumulates a leaf's gradient exists once something depends on the leaf.
    with torch.enable_grad():
        function = tensor.view_as(tensor).grad_fn
    return None if function is None else function.next_functions[0][0]


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Every node of the graph after all it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(c, False) for c, _ in node.next_functions if c is not None and c not in seen]
    return order


class _Groups:
    """Nodes joined into groups."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def has(self, node: Node) -> bool:
        return node in self._above

    def top(self, node: Node) -> Node:
        self._above.setdefault(node, node)
        while self._above[node] is not node:
            self._above[node] = self._above[self._above[node]]
            node = self._above[node]
        return node

    def join(self, first: Node, second: Node) -> None:
        self._above[self.top(first)] = self.top(second)
