"""Random numbers of a forward pass that do not know the layout.

Each is a function of the seed, the step, the sample, the module, the number of the call in it and
the element's place in the whole tensor: ``counter.py`` computes it. ``attribution.py`` finds the
samples in a tensor, ``frames.py`` knows which module is running, ``draws.py`` says how torch's
functions draw, ``mode.py`` catches their calls, and ``forward.py`` is what an engine holds.
"""

from paceline.randomness.draws import DRAWN_BY_ELEMENT
from paceline.randomness.forward import ForwardRandomness, active
from paceline.randomness.table import TensorPart

__all__ = ["DRAWN_BY_ELEMENT", "ForwardRandomness", "TensorPart", "active"]
