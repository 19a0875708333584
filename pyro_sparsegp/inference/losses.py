"""Whether losses still fall."""

import math

import numpy as np

# Nats that are told: of one parameter that was its sd away, and a row's, in the third digit of scores.
_FELL, _FELL_A_ROW = 0.5, 1e-3


def fell(losses: np.ndarray, rows: int) -> list[str]:
    """A line if losses fell from one half, ``(2, steps)``, to the next, by more than chance and more than matters."""
    fall = fall_of(losses)
    if fall <= max(_FELL, _FELL_A_ROW * rows):
        return []
    return [f"the loss fell by {fall:.1f} nats in the last tenth of the steps. Train longer."]


def fall_of(losses: np.ndarray) -> float:
    """By how much losses fell from one half, ``(2, steps)``, to the next; 0 where that may be chance."""
    (first, end), steps = losses, losses.shape[1]
    fall, error = float(first.mean() - end.mean()), math.hypot(first.std(), end.std()) / math.sqrt(steps)
    return fall if fall > 2 * error else 0.0
