"""Numbers of torch's generator, taken for a kernel that draws as torch's dropout would have drawn."""

from __future__ import annotations

import functools
from typing import List, Sequence

import torch
from torch import Tensor

_BLOCK, _OF_THREAD = 256, 4  # threads of a block of torch's kernel, and numbers that one of them takes at a time
_COLUMNS = 32  # those of a word of the mask
_MOST = 0.99  # the largest dropout: with one close to 1 no number may keep anything
NOTHING: List[int] = []  # where torch is to draw


def taken(x: Tensor, hidden: int, dropouts: Sequence[float], up_first: bool) -> List[int]:
    """The seed, torch's threads, and the first number of each of three dropouts, which the generator is past then.

    Those of the first two are in front of ``x``, and that of the third of as many rows of ``hidden`` values. Nothing
    where torch is to draw: in the capture of a graph, which takes numbers at each replay, or where tensors are small,
    or of another form.
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
    """The threads of torch's kernel on a device, for large tensors; 0 where it, or a kernel for it, is not known."""
    if not torch.__version__.startswith("2.11.") or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // _BLOCK) * _BLOCK
