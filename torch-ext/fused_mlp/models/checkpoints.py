"""Checkpoint conversion for transformers, for a layer that packs the weights of the class it replaces."""

from __future__ import annotations

import sys
from typing import Any, Iterator


class PackedWeights:
    """Makes transformers load ``gate_proj`` and ``up_proj`` of a checkpoint into ``gate_up_proj``, and split it on
    saving.

    The rules are transformers objects. transformers itself iterates over them, so it is loaded by then and not imported
    here.
    """

    def __iter__(self) -> Iterator[Any]:
        loading = sys.modules["transformers.core_model_loading"]
        for parameter in ("weight", "bias"):
            yield loading.WeightConverter(
                source_patterns=[rf"\.gate_proj\.{parameter}", rf"\.up_proj\.{parameter}"],
                target_patterns=rf"\.gate_up_proj\.{parameter}",
                operations=[loading.Concatenate(dim=0)],
            )
