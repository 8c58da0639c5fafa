"""Writes cuda/sm90/tuning.h."""

from dataclasses import astuple

from tuning.fit import NEAR_FLOOR_ROWS, Constants, Rows, StreamedTime, TiledTime
from tuning.kernels import Kernel

HEADER = """\
// What the sm_90a GEMMs choose by, made by `make tune` on {gpu}.
// How it is fitted is in tools/tuning/fit.py.
#pragma once

#include <cstdint>
#include <limits>

namespace fused_mlp::sm90 {{

// A tiled kernel, and its time in microseconds: a start, and for every round of tiles (as many as the chip holds at
// once) a part of its own, one for each 64 elements of k, and one for an activation without a gate.
struct TiledTime {{
  int block_m;
  int block_n;
  bool ping_pong;
  int split_k;
  double start, round, k_block, activation;
}};

// The time of the streamed kernels: a start, what is added where k is split in 2, from 4 parts on and from 8, and a
// part for each 64 elements of k that a CTA reads and each of its rows: one as the CTAs exceed what saturates the chip
// (`saturating` a multiprocessor), as the splits are too, and one for every round of CTAs, one a multiprocessor. What
// the bytes take at least grows with the part of the chip that is idle in the last round of as many as it holds.
struct StreamedTime {{
  double start, split_2, split_4, split_8, k_block, k_row, saturating, round_k_block, round_k_row, tail;
}};

// Rows of a, from first to last, at which torch's GEMM is faster: for a plain product, and with a pointwise kernel
// behind it.
struct TorchRows {{
  int64_t first, last;
  const char* reason;
}};

// clang-format off
constexpr TiledTime kTiledGated[] = {{
{tiled_gated}
}};
constexpr TiledTime kTiledPlain[] = {{
{tiled_plain}
}};
constexpr StreamedTime kStreamedGated = {streamed_gated};
constexpr StreamedTime kStreamedActivated = {streamed_activated};
constexpr StreamedTime kStreamedPlain = {streamed_plain};
constexpr double kBytesPerMicrosecond = {bandwidth:.1f}e6;
constexpr double kFlopsPerMicrosecond = {arithmetic:.0f}e6;

constexpr TorchRows kTorchPlain = {torch_plain};
constexpr TorchRows kTorchActivated = {torch_activated};
// A plain product among torch's rows, of up to so many, is ours for all that where the estimate is up to so many times
// what bytes and arithmetic take at least: torch's can hardly be faster.
constexpr int64_t kNearFloorRows = {near_floor_rows};
constexpr double kNearFloor = {near_floor};
// clang-format on

}}  // namespace fused_mlp::sm90
"""


def header(constants: Constants, gpu: str) -> str:
    return HEADER.format(
        gpu=gpu,
        tiled_gated=table(constants.tiled["gated"]),
        tiled_plain=table(constants.tiled["plain"]),
        **{f"streamed_{kind}": braced(time) for kind, time in constants.streamed.items()},
        bandwidth=constants.bytes_per_microsecond / 1e6,
        arithmetic=constants.flops_per_microsecond / 1e6,
        near_floor_rows=NEAR_FLOOR_ROWS,
        near_floor=constants.near_floor,
        torch_plain=rows(constants.torch["plain"], "cuBLAS is mostly faster for a plain product of"),
        torch_activated=rows(constants.torch["activated"], "cuBLAS is faster for one layer with an activation and"),
    )


def table(times: dict[Kernel, TiledTime]) -> str:
    def row(kernel: Kernel, time: TiledTime) -> str:
        ping_pong = "true" if kernel.ping_pong else "false"
        constants = ", ".join(map(str, astuple(time)))
        return f"    {{{kernel.block_m}, {kernel.block_n}, {ping_pong}, {kernel.split_k}, {constants}}},"

    return "\n".join(row(kernel, time) for kernel, time in times.items())


def braced(time: StreamedTime) -> str:
    return "{" + ", ".join(map(str, astuple(time))) + "}"


def rows(torch: Rows | None, faster: str) -> str:
    if torch is None:
        return "{0, -1, nullptr}"
    if torch.last is None:
        last, which = "std::numeric_limits<int64_t>::max()", f"more than {torch.first - 1} rows"
    else:
        last, which = str(torch.last), f"{torch.first} to {torch.last} rows"
    return f'{{{torch.first}, {last},\n    "as measured, {faster} {which}"}}'
