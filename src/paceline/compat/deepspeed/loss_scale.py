"""The scale of losses in fp16, with DeepSpeed's decisions: hysteresis, window, least scale."""

from __future__ import annotations

from typing import Any

from paceline.config.deepspeed.settings import Fp16Scaling
from paceline.errors import NonFiniteError


class DeepSpeedScaler:
    """What losses are multiplied by; fixed, or lowered by overflows and raised after good steps."""

    def __init__(self, settings: Fp16Scaling) -> None:
        self._settings = settings
        self.scale = settings.initial if settings.fixed is None else settings.fixed
        self._iteration, self._last_overflow = 0, -1
        self._hysteresis = settings.hysteresis

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return self._settings.fixed is None

    def update(self, overflowed: bool) -> None:
        """Tell of a step; raises where the scale is the least one and still too large."""
        if not self.dynamic:
            return
        settings = self._settings
        if overflowed:
            if settings.hysteresis == 1 or self._hysteresis == 1:
                self._lower()
            else:
                self._hysteresis -= 1
            self._last_overflow = self._iteration
        else:
            if settings.consecutive_hysteresis:
                self._hysteresis = settings.hysteresis
            stable = self._iteration - self._last_overflow - 1
            if stable > 0 and stable % settings.window == 0:
                self._hysteresis = settings.hysteresis
                self.scale *= 2
        self._iteration += 1

    def _lower(self) -> None:
        if self.scale == self._settings.minimum:
            raise NonFiniteError(
                f"the gradients overflow at fp16.min_loss_scale={self.scale:g}, the least loss "
                "scale there may be: it is not the scale that makes them overflow. Look at the "
                "loss, lower the learning rate, or use bf16.",
                step=self._iteration,
                what="gradients",
            )
        self.scale = max(self.scale / 2, self._settings.minimum)

    def state_dict(self) -> dict[str, Any]:
        """What has to survive."""
        return {
            "scale": self.scale,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.scale = float(state["scale"])
        self._iteration, self._last_overflow = state["iteration"], state["last_overflow"]
        self._hysteresis = state["hysteresis"]
