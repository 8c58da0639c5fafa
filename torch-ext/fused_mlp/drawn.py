"""Random numbers of torch's generator, reserved for a kernel that draws the same ones as torch's dropout would."""

from __future__ import annotations

import functools
from typing import List, Sequence

import torch
from torch import Tensor

_BLOCK, _OF_THREAD = 256, 4  # threads per block of torch's kernel, and numbers that a thread draws at a time
_COLUMNS = 32  # columns per word of the mask
_MOST = 0.99  # the largest dropout; close to 1, no number may keep anything
NOTHING: List[int] = []  # torch has to draw


def taken(x: Tensor, hidden: int, dropouts: Sequence[float], up_first: bool) -> List[int]:
    """Return the seed, torch's number of threads, and the first number of each of three dropouts; advance the
    generator.

    The first two dropouts apply to ``x``, and the third to as many rows of ``hidden`` values. Returns nothing if torch
    has to draw: while a graph is captured, which draws new numbers at each replay, or if tensors are small or of
    another form.
    """
    threads, columns, count = _threads(x.device.index), x.shape[-1], x.numel()
    widths = (columns, columns, hidden)
    sizes = [count // columns * width if drop > 0.0 else 0 for width, drop in zip(widths, dropouts)]
    fits = threads > 0 and max(dropouts) <= _MOST and max(sizes) < 1 << 31 and x.data_ptr() % 16 == 0
    for size, width in zip(sizes, widths):
        fits = fits and (size == 0 or (size >= threads and width % _COLUMNS == 0))
    if not fits or torch.cuda.is_current_stream_capturing():
        return NOTHING
    generator = torch.cuda.default_generators[x.device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    if offset % _OF_THREAD != 0:
        return NOTHING
    found = [seed - (seed >> 63 << 64), threads, 0, 0, 0]
    for place in (1, 0, 2) if up_first else (0, 1, 2):
        found[2 + place] = offset
        if sizes[place] > 0:
            offset += ((sizes[place] - 1) // (threads * _OF_THREAD) + 1) * _OF_THREAD
    generator.set_offset(offset)
    return found


@functools.cache
def _threads(device: int) -> int:
    """Return the threads of torch's kernel on a device, for large tensors; 0 if it, or our kernel, is unknown there."""
    if not torch.__version__.startswith("2.11.") or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // _BLOCK) * _BLOCK
