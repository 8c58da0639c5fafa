"""The plans by which the compiled ops compute a call, and their descriptions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Dict, Optional, Sequence, Tuple

# Why a layer is left to torch's GEMM, by the codes of plan.h.
REFUSALS: Dict[str, str] = {
    "gpu": "no fused GEMM for this GPU",
    "instruction_set": "no AMX on this CPU, or FUSED_MLP_CPU_ISA excludes it",
    "float32": "no fused GEMM for float32",
    "empty": "an empty operand",
    "too_large": "a dimension of 2^31 or more",
    "odd_features": "features not a multiple of 8",
    "odd_inputs": "transposed weights with inputs that are not a multiple of 64",
    "unaligned_rows": "rows that overlap or are not aligned to 16 bytes",
    "column_major_weight": "a weight that is not row-major",
    "strided_bias": "a strided bias",
    "unaligned_bias": "a bias not aligned to 4 bytes",
    "many_experts": "more experts, or more routed rows, than the kernels support",
    "many_rows": "transposed weights with more than 32 rows per expert",
    "torch_is_faster": "torch's GEMM is estimated to be faster, from measurements on this kind of GPU",
    "torch_by_model": "a performance model of this GPU, not a measurement, predicts that torch's GEMM is as fast",
    "low_rank": "no fused GEMM for this GPU adds an adapter's product",
}

_SCHEDULES = {
    "ping_pong": "each warpgroup's epilogue overlaps the other's GEMM",
    "cooperative": "all warps share each tile",
    "swapped": "tile height chosen to fill the GPU",
    "swapped_half_rows": "tile height chosen to fill the GPU",
}
_VECTORS = ("avx2", "avx512", "avx512_bf16")
_TORCH = {None: "torch's GEMM", "epilogue": "torch's GEMM with the activation in its epilogue"}


@dataclass(frozen=True)
class Part:
    """How one layer of a call is computed.

    ``implementation`` is "sm90", "sm80", "amx", "avx512_bf16", "avx512" or "avx2" if one kernel runs the GEMM and its
    epilogue, or "torch" if torch runs the GEMM. For a layer with a quantised weight it is "quantized" if a kernel reads
    the weight packed, or "decoded" if it is decoded to a tensor first. For "decoded" and "torch", ``refusal`` is the
    reason, a key of :data:`REFUSALS`, and ``pointwise`` says where activation and gate are applied: None (there are
    none), "epilogue" (torch's own), "cuda", or the instruction set of the CPU's pointwise kernels. The other fields
    describe a fused GPU kernel as cuda/gemm/problem.h does; on a CPU, ``kernel`` is "matmul" for standalone GEMMs, and
    for quantised weights the instruction set. ``basis`` is "model" if a model of the GPU's times chose the kernel,
    rather than measured times.
    """

    layer: str
    implementation: str
    refusal: Optional[str] = None
    pointwise: Optional[str] = None
    kernel: Optional[str] = None
    block_m: Optional[int] = None
    block_n: Optional[int] = None
    schedule: Optional[str] = None
    split_k: Optional[int] = None
    basis: Optional[str] = None

    @property
    def fused(self) -> bool:
        return self.implementation != "torch"

    def __str__(self) -> str:
        if self.implementation == "decoded":
            return "decoded first" + ("" if self.refusal is None else f": {REFUSALS[self.refusal]}")
        if self.implementation == "quantized" and self.kernel == "scaled":
            split = f", split-k {self.split_k}" if self.split_k > 1 else ""
            return f"read packed: x rounded to FP8, FP8 GEMM in tiles of {self.block_m} rows{split}"
        if self.implementation == "quantized" and self.kernel == "scaled_mm":
            return "read packed: rows of x rounded to FP8, torch's GEMM of scaled rows"
        if self.implementation == "quantized" and self.kernel == "amx":
            return "read packed: weights decoded on the fly for AMX tiles"
        if self.implementation == "quantized" and self.kernel in _VECTORS:
            return f"read packed: few rows, weights decoded in registers by an {self.kernel} kernel"
        if self.implementation == "quantized":
            how = "streamed" if self.kernel == "streamed" else "decoded on the fly"
            split = f", split-k {self.split_k}" if self.split_k > 1 else ""
            return f"read packed: weights {how}, tiles of {self.block_m} rows{split}"
        if self.implementation == "torch":
            return f"{self._torch_way()}: {REFUSALS[self.refusal]}"
        if self.implementation == "amx":
            return "GEMMs on AMX tiles" if self.kernel == "matmul" else "fused GEMM on AMX tiles"
        if self.implementation in _VECTORS and self.kernel == "matmul":
            pointwise = f" and {self.pointwise} pointwise kernels" if self.pointwise else ""
            return f"this package's {self.implementation} GEMMs{pointwise}"
        if self.implementation in _VECTORS:
            return f"few rows, weights streamed by an {self.implementation} kernel"
        split = f", split-k {self.split_k}" if self.split_k > 1 else ""
        basis = "; chosen by a performance model of this GPU, not a measurement" if self.basis == "model" else ""
        if self.kernel == "grouped":
            how = f"few rows per expert, the chosen weights streamed, tiles of at most {self.block_m} rows{split}"
        elif self.kernel == "grouped_tiled":
            how = f"rows sorted by expert, in tiles of at most {self.block_m} rows, fitted to each expert"
        elif self.kernel == "streamed":
            how = f"few rows, weights streamed, tiles of {self.block_m} rows{split}"
        else:
            how = f"tiles of {self.block_m} x {self.block_n}{split}, {_SCHEDULES[self.schedule]}"
        return f"fused {self.implementation} GEMM: {how}{basis}"

    def _torch_way(self) -> str:
        if self.pointwise in _TORCH:
            return _TORCH[self.pointwise]
        if self.pointwise == "cuda":
            return "torch's GEMM and a pointwise kernel"
        return f"torch's GEMM on blocks of rows and {self.pointwise} pointwise kernels"


@dataclass(frozen=True)
class Kept:
    """The values that a call saves for its backward besides its operands: their names and bytes.

    ``gemms`` describes, for a CUDA call, the GEMMs that a pointwise step accompanies, and for a CPU call, the GEMMs
    that this package runs. torch runs the others, on a CPU with pointwise kernels between them.
    """

    names: Tuple[str, ...]
    bytes: int
    gemms: Tuple[Part, ...] = ()

    def __str__(self) -> str:
        gemms = "".join(f"; {part.layer}: {part}" for part in self.gemms)
        if not self.names:
            return f"saves only the operands and recomputes the rest{gemms}"
        before = "" if self.names == ("hidden",) else " before the activation"
        return f"saves {' and '.join(self.names)}{before}, {self.bytes / 2**20:.1f} MiB{gemms}"


def parsed(record: str, layers: Sequence[str]) -> Tuple[Part, ...]:
    """Parse a record into the parts of a call, named in the order of its layers."""
    return tuple(Part(layer, **values) for layer, values in zip(layers, json.loads(record)))


def in_words(parts: Sequence[Part]) -> str:
    first, *others = parts
    return "; ".join([str(first), *(f"{part.layer}: {part}" for part in others)])
