"""Writes cuda/sm90/tuning.h."""

from tuning.fit import Constants, KernelTime, Rows
from tuning.kernels import Kernel

HEADER = """\
// What the sm_90a GEMMs choose by, made by `make tune` on {gpu}.
// How it is fitted is in tools/tuning/fit.py.
#pragma once

#include <cstdint>
#include <limits>

namespace fused_mlp::sm90 {{

// A kernel for more than 64 rows, and its time in microseconds: a start, and for every round of tiles (as many as the
// chip holds at once) a part of its own, one for each 64 elements of k, and one for an activation without a gate.
struct KernelTime {{
  bool streamed;
  int block_n;
  bool ping_pong;
  int multicast;
  int split_k;
  double start, round, k_block, activation;
}};

// Rows of a, from first to last, at which torch's GEMM is faster.
struct TorchRows {{
  int64_t first, last;
  const char* reason;
}};

// clang-format off
constexpr KernelTime kGatedTimes[] = {{
{gated}
}};
constexpr KernelTime kPlainTimes[] = {{
{plain}
}};
constexpr double kBytesPerMicrosecond = {bandwidth:.1f}e6;

// Of the streamed kernel for up to 64 rows: CTAs a multiprocessor that saturate the memory, and what a part of k costs
// to add up, in blocks of k.
constexpr double kSaturating = {saturating};
constexpr double kReduction = {reduction};

constexpr TorchRows kTorchPlain = {torch_plain};
constexpr TorchRows kTorchActivated = {torch_activated};
// clang-format on

}}  // namespace fused_mlp::sm90
"""


def header(constants: Constants, gpu: str) -> str:
    return HEADER.format(
        gpu=gpu,
        gated=table(constants.gated),
        plain=table(constants.plain),
        bandwidth=constants.bytes_per_microsecond / 1e6,
        saturating=constants.saturating,
        reduction=constants.reduction,
        torch_plain=rows(constants.torch_plain, "cuBLAS is faster for a plain product of"),
        torch_activated=rows(constants.torch_activated, "cuBLAS and a kernel behind it are faster for"),
    )


def table(times: dict[Kernel, KernelTime]) -> str:
    def row(kernel: Kernel, time: KernelTime) -> str:
        streamed, ping_pong = ("true" if flag else "false" for flag in (kernel.streamed, kernel.ping_pong))
        return (
            f"    {{{streamed}, {kernel.block_n}, {ping_pong}, {kernel.multicast}, {kernel.split_k}, "
            f"{time.start}, {time.round}, {time.k_block}, {time.activation}}},"
        )

    return "\n".join(row(kernel, time) for kernel, time in times.items())


def rows(torch: Rows | None, faster: str) -> str:
    if torch is None:
        return "{0, -1, nullptr}"
    if torch.last is None:
        last, which = "std::numeric_limits<int64_t>::max()", f"more than {torch.first - 1} rows"
    else:
        last, which = str(torch.last), f"{torch.first} to {torch.last} rows"
    return f'{{{torch.first}, {last},\n    "as measured, {faster} {which}"}}'
