"""Writes cuda/sm90/plan/tuning.h."""

from dataclasses import astuple

from tuning.fit import Constants, TiledTime
from tuning.kernels import LOOPS, SCHEDULES, Gpu, Kernel

HEADER = """\
// The constants by which the sm_90a GEMMs are chosen, made by `make tune` on {gpu}.
// time_model.h says what they mean, tools/tuning/fit.py how they are fitted.
#pragma once

#include "time_model.h"

namespace fused_mlp::sm90 {{

// clang-format off
constexpr TunedKernel kTuned[] = {{
{tiled}
}};
{streamed}

constexpr MeasuredOn kMeasuredOn = {measured_on};
constexpr TorchTime kTorch = {torch};
constexpr Peak kPeak = {{{bandwidth:.1f}e6, {arithmetic:.0f}e6}};
// clang-format on

}}  // namespace fused_mlp::sm90
"""


def header(constants: Constants, name: str, gpu: Gpu) -> str:
    tiled = [
        tuned("Gated" if gated else "Plain", *each)
        for gated in (True, False)
        for each in constants.tiled[gated].items()
    ]
    return HEADER.format(
        gpu=name,
        measured_on=braced(gpu),
        tiled="\n".join(tiled),
        streamed="\n".join(
            f"constexpr StreamedTime kStreamed{kind.title().replace('_', '')} = {braced(astuple(time))};"
            for kind, time in constants.streamed.items()
        ),
        torch=braced(astuple(constants.torch)),
        bandwidth=constants.bytes_per_microsecond / 1e6,
        arithmetic=constants.flops_per_microsecond / 1e6,
    )


def tuned(product: str, kernel: Kernel, time: TiledTime) -> str:
    loop, schedule = f"MainLoop::k{LOOPS[kernel.loop]}", f"Schedule::k{SCHEDULES[kernel.schedule]}"
    names = (loop, f"Product::k{product}", kernel.block_m, kernel.block_n, schedule, kernel.split_k)
    return f"    {{{braced(names)}, {braced(astuple(time))}}},"


def braced(values: tuple) -> str:
    return "{" + ", ".join(map(str, values)) + "}"
