"""Padding of experts whose features are not multiples of 8, with copies filled up with zeros.

Without padding, each expert is a product whose rows begin at arbitrary bytes. These products take up to several times
as long as a copy of the weights. Zeros change no sum: an activation of them is multiplied by zeros of the second
weight.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch.nn.functional as F
from torch import Tensor

from .. import experts

_STEP = 8  # elements of 16 bytes


def is_needed(given: Sequence[Optional[Tensor]], form: experts.Form) -> bool:
    """True if the operands of a call need padding."""
    return any(_lacking(given, form))


def filled(given: Sequence[Optional[Tensor]], form: experts.Form) -> Tuple[Optional[Tensor], ...]:
    """Return the padded operands. The first columns of their result are the result of the call."""
    x, index, weights, gate_up, down, gate_up_bias, down_bias = given
    features, hidden = _lacking(given, form)
    parts = 2 if form.gated and not form.interleaved else 1  # contiguous: F.pad may take such views for channels_last
    of_part = 2 * hidden if form.interleaved else hidden
    if form.transposed:
        gate_up = F.pad(gate_up.unflatten(2, (parts, -1)), (0, of_part, 0, 0, 0, features)).contiguous().flatten(2)
        down = F.pad(down, (0, features, 0, hidden))
    else:
        gate_up = F.pad(gate_up.unflatten(1, (parts, -1)), (0, features, 0, of_part)).contiguous().flatten(1, 2)
        down = F.pad(down, (0, hidden, 0, features))
    if gate_up_bias is not None:
        gate_up_bias = F.pad(gate_up_bias.unflatten(1, (parts, -1)), (0, of_part)).flatten(1)
    if down_bias is not None:
        down_bias = F.pad(down_bias, (0, features))
    return F.pad(x, (0, features)), index, weights, gate_up, down, gate_up_bias, down_bias


def _lacking(given: Sequence[Optional[Tensor]], form: experts.Form) -> Tuple[int, int]:
    """Return the numbers of features and of hidden features to add."""
    return -given[0].shape[1] % _STEP, -given[4].shape[1 if form.transposed else 2] % _STEP
