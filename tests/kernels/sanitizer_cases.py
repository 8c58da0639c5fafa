"""Small calls that reach every kernel. As a script (`make sanitize`), it runs them under NVIDIA's compute-sanitizer.

Memcheck finds accesses outside of allocations, racecheck hazards in shared memory, synccheck misuse of barriers.
"""

import importlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests/support", "tests/samples"))
import gemm_kernels
import machine
import project
from builder import toolchain
from reference import ACTIVATIONS, DTYPES, operands

TOOLS = ("memcheck", "racecheck", "synccheck")

# Rows, in, out. All dimensions have tails, and together the shapes reach every kernel: test_gemm.py checks this.
GATED = [
    # streamed, by rows of a tile, with k split into one to eight parts
    *((5, k, n) for k, n in ((40, 40), (1544, 2568), (1032, 1032), (1032, 40))),
    *((13, 40, 5128), (40, 1032, 520), (40, 776, 40)),
    *((65, k, n) for k, n in ((1544, 1288), (1032, 520), (776, 40))),
    *((150, 2056, 776), (129, 1032, 392), (129, 776, 40)),
    *((177, 40, 10248), (197, 1032, 264), (197, 776, 40)),
    # streamed, with rows of the weights multiples of 256 bytes apart: blocks of k are read two at a time
    *((5, 1152, 1032), (13, 2176, 264), (40, 128, 520), (64, 896, 520)),
    # tiled: several tiles of rows, and a partial one
    *((m, 328, n) for m, n in ((1300, 1032), (49, 12296))),
    *((m, 328, n) for m, n in ((3000, 392), (49, 10248))),
    (330, 328, 3080),
    *((m, 328, n) for m, n in ((900, 1800), (113, 16392))),
    *((m, 328, 40) for m in (65, 40)),
    *((m, 328, n) for m, n in ((900, 520), (65, 5128))),
    *((m, 328, n) for m, n in ((900, 1032), (129, 5128))),
    (1300, 520, 1032),
    *((m, 328, n) for m, n in ((900, 1544), (49, 14344))),
    *((m, 328, n) for m, n in ((1500, 520), (100, 5128))),
    *((m, 328, n) for m, n in ((2000, 1032), (129, 10248))),
    *((m, 328, n) for m, n in ((777, 2056), (177, 8200))),
]
PLAIN = [
    # streamed
    *((5, k, n) for k, n in ((40, 40), (2056, 2568), (1544, 1032), (1544, 40))),
    *((40, k, n) for k, n in ((520, 40), (1032, 264), (1032, 40))),
    *((100, 776, 264), (95, 1544, 1032), (100, 1032, 264), (65, 776, 40)),
    *((40, 40, 20488), (129, 1544, 1032), (177, 1032, 264), (129, 776, 40)),
    *((49, 40, 20488), (150, 1544, 1032), (250, 1032, 264), (197, 776, 40)),
    *((129, 40, 10248), (197, 2056, 1032), (197, 1032, 520), (150, 1032, 264)),
    *((113, 40, 10248), (250, 1544, 520), (250, 1544, 264)),
    *((5, 2176, 1032), (13, 4224, 264), (40, 128, 1032), (64, 1152, 264)),
    # tiled
    (1500, 328, 2056),
    *((m, 328, n) for m, n in ((1300, 1800), (95, 20488))),
    (330, 328, 6152),
    *((m, 328, n) for m, n in ((900, 1800), (113, 10248))),
    *((m, 328, n) for m, n in ((900, 776), (49, 10248))),
    (1500, 520, 776),
    (95, 520, 10248),
    *((m, 328, n) for m, n in ((1100, 1800), (129, 12296))),
    (257, 3080, 40),
    (100, 3080, 2568),
    *((m, 328, 40) for m in (49, 40)),
    *((m, 328, n) for m, n in ((900, 1032), (65, 10248))),
    *((m, 328, n) for m, n in ((1500, 776), (95, 10248))),
    *((m, 328, n) for m, n in ((2000, 1288), (177, 12296))),
]
# One tile with a tail, whole tiles, and several tiles for each CTA; both widths of the tiles of dx.
TRAINING = [(5, 40, 40), (128, 128, 128), (300, 264, 520), (129, 72, 136), (2100, 200, 2056)]
# On a Hopper GPU the last two reach sm80's streamed kernels; the second of these starts early.
WHOLE = [
    (5, (272, 528, 144)),
    (65, (272, 528, 144)),
    (600, (272, 528, 144)),
    (5, (512, 1024, 512)),
    (20, (512, 1024, 512)),
]


def layers() -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """Yields function, operands and activation for each call of a fused layer."""
    count = 0
    for dtype in (torch.bfloat16, torch.float16):
        for function, shapes in (("gated_linear", GATED), ("linear", PLAIN)):
            for rows, n_in, n_out in shapes:
                for activation in ("linear", ACTIVATIONS[1 + count % (len(ACTIVATIONS) - 1)]):
                    yield (
                        function,
                        operands(function, (rows,), (n_in, n_out, 0), dtype=dtype, device="cuda"),
                        activation,
                    )
                    count += 1


def mlps() -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """Yields function, operands and activation for each call of a whole MLP."""
    for dtype in (torch.bfloat16, torch.float16):
        for function in ("gated_mlp", "mlp"):
            for rows, sizes in WHOLE:
                yield function, operands(function, (rows,), sizes, dtype=dtype, device="cuda"), "silu"


def gemms_of(architecture: str, fused_mlp) -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """Yields the calls of layers and MLPs for an architecture.

    sm90's kernels compute all layers, in every split of k, and MLPs as chosen. Each other kernel is forced while its
    own cases are computed.
    """
    if architecture == "chosen":
        yield from layers()
    if architecture == "sm90":
        with gemm_kernels.forced(fused_mlp, architecture):
            yield from layers()
    if architecture != "sm80":
        yield from mlps()
    if architecture == "chosen":
        return
    for kernel, entry in enumerate(gemm_kernels.entries(architecture)):
        if entry[1] in gemm_kernels.TRAINING or not fits(architecture, entry):
            continue
        with gemm_kernels.forced(fused_mlp, architecture, kernel):
            for count, (function, (rows, n_in, n_out)) in enumerate(forced_shapes(architecture, entry)):
                for dtype in (torch.bfloat16, torch.float16):
                    activation = ACTIVATIONS[(kernel + count) % len(ACTIVATIONS)]
                    yield (
                        function,
                        operands(function, (rows,), (n_in, n_out, 0), dtype=dtype, device="cuda"),
                        activation,
                    )


def training_kernels() -> Iterator[tuple[str, int, str]]:
    """Yields the GEMM to force and the kind of call that reaches it: sm90's all at once, those of sm80 one by one."""
    for architecture in gemm_kernels.ARCHITECTURES:
        if not gemm_kernels.runs_on(architecture, torch.cuda.get_device_capability()):
            continue
        if architecture == "sm90":
            yield architecture, -1, ""
            continue
        for kernel, entry in enumerate(gemm_kernels.entries(architecture)):
            if entry[1] in gemm_kernels.TRAINING and fits(architecture, entry):
                yield architecture, kernel, "plain" if entry[1].startswith("Plain") else "gated"


def training(fused_mlp, by_cublas: bool = False) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the name and the call of each training product, for the kernels that are forced.

    `by_cublas` adds the gradient of the second weight, for which the hidden values are stored.
    """
    native = importlib.import_module(f"{fused_mlp.__name__}.backends.native")
    count = 0
    for dtype in (torch.bfloat16, torch.float16):
        for rows, n_in, hidden in TRAINING:
            made = operands("gated_mlp", (rows,), (n_in, hidden, n_in), dtype=dtype, device="cuda")
            x, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = made.values()
            code = count % len(ACTIVATIONS)
            count += 1
            for up in (up_weight, None):
                first = (gate_weight, up), (gate_bias, None if up is None else up_bias)
                what = f"{'gated' if up is not None else 'plain'} training: {rows}, {n_in}, {hidden}, {dtype}, {code}"

                def call(first=first, x=x, down_weight=down_weight, code=code):
                    (weight, up), (bias, up_bias) = first
                    _, gate, kept_up = native.training_forward(
                        x, weight, up, None, bias, up_bias, None, code, True, None
                    )
                    needs = 1 if up is not None else 1 << 4  # x; for a plain MLP the bias, which needs no product
                    needs |= by_cublas << 3
                    given = (x, weight, up, down_weight, bias, up_bias, gate, None if up is None else kept_up)
                    native.training_backward(torch.ones_like(x), *given, code, needs, None)
                    return native.training_backward_(torch.ones_like(x), *given, code, needs, None)

                yield what, call


def biases(native) -> int:
    """Computes bias gradients, by vectors and by elements, with enough rows to sum in parts; returns the call count."""
    cases = list(itertools.product(((2100, 24, 40), (3100, 21, 33)), DTYPES))
    for (rows, n_in, features), dtype in cases:
        print(f"gradient of a bias: {rows}, {features}, {dtype}", flush=True)
        x, weight, bias, gate = (
            torch.randn(size, device="cuda").to(dtype)
            for size in ((rows, n_in), (features, n_in), (features,), (rows, features))
        )
        given = (x, weight, None, None, bias, None, gate, None)
        native.training_backward(torch.ones_like(gate), *given, 0, 1 << 4, None)
        torch.cuda.synchronize()
    return len(cases)


def forced_shapes(architecture: str, entry: tuple[str, ...]) -> list[tuple[str, tuple[int, int, int]]]:
    """Function, and rows, in and out, for a listed kernel: whole tiles, tails in all dimensions, and k of less than a
    block, of some blocks, and of more than the ring holds. One shape is enough for sm90, whose kernels are also chosen
    in other cases.
    """
    function = "gated_linear" if entry[1] == "Gated" else "linear"
    if architecture == "sm90":
        return [(function, (int(entry[2]) + 3, 328, 136))]
    loop, product, rows, width, block_k, *_, stages = entry
    rows, width, block_k, stages = (int(number) for number in (rows, width, block_k, stages))
    columns = width if loop == "streamed" or product == "Plain" else width // 2
    shapes = [
        (rows, block_k * 2, columns),
        (rows + 5, 8, columns + 8),
        (max(1, rows - 3), block_k * (stages + 2) + 24, 2 * columns - 8),
        (2 * rows + 1, block_k - 8, 8),
        (1, block_k * stages, 3 * columns),
    ]
    return [(function, shape) for shape in shapes]


def fits(architecture: str, entry: tuple[str, ...]) -> bool:
    """True if the GPU has the shared memory that a kernel needs; it has for all of sm90's."""
    if architecture == "sm90":
        return True
    rows, width, block_k, warps_m, warps, *_, stages = (int(number) for number in entry if number.isdigit())
    if entry[0] == "streamed":  # as in cuda/sm80/shape.h
        weights = width * (2 if "Gated" in entry else 1)
        behind = warps * min(rows, 16) * (weights + 4) * 4 if warps > 1 else 0
    else:
        weights = width
        behind = width * 2 * (2 if warps_m * warps > 4 else 1)
    needed = (rows + weights) * block_k * 2 * stages + behind
    return needed <= torch.cuda.get_device_properties(0).shared_memory_per_block_optin


def pointwise() -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    """Yields gate, up and activation: dense and packed, with and without a tail."""
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            for rows, cols in ((3, 328), (5, 77)):
                packed = torch.randn(rows, 2 * cols, device="cuda").to(dtype)
                yield *packed.chunk(2, dim=-1), activation
            yield *(torch.randn(rows, cols, device="cuda").to(dtype) for _ in range(2)), activation


def experts(architecture: str) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
    """Yields operands and form of calls of experts_mlp: tiles with all numbers of rows, one to eight CTAs for each."""
    interleaved = {"interleaved": True, "limit": 7.0, "up_offset": 1.0}
    for dtype in (torch.bfloat16, torch.float16):
        for (tokens, k, experts), form in itertools.product(
            ((1, 4, 8), (12, 3, 5), (40, 4, 12), (120, 3, 9), (200, 2, 4), (64, 8, 512), (900, 3, 7)),
            ({}, interleaved, {"gated": False}, {"transposed": True, **interleaved}, {"transposed": True}),
        ):
            n_in, hidden, out = {1: (1032, 520, 40), 12: (1152, 640, 40)}.get(tokens, (136, 72, 264))
            if "transposed" in form:
                if architecture == "sm90" and tokens * k > 32 * experts:
                    continue  # too many rows per expert for transposed weights
                n_in, hidden = n_in // 64 * 64, hidden // 64 * 64
            rows = hidden if "gated" in form else 2 * hidden
            made = {"x": torch.randn(tokens, n_in), "top_k_index": torch.randint(-1, experts + 1, (tokens, k))}
            made |= {"top_k_weights": torch.rand(tokens, k)}
            made |= {
                "gate_up_weight": torch.randn(experts, rows, n_in),
                "down_weight": torch.randn(experts, out, hidden),
            }
            made |= {"gate_up_bias": torch.randn(experts, rows), "down_bias": torch.randn(experts, out)}
            if "transposed" in form:
                made |= {name: made[name].mT.contiguous() for name in ("gate_up_weight", "down_weight")}
            routing = ("top_k_index", "top_k_weights")
            yield (
                {name: value.cuda().to(value.dtype if name in routing else dtype) for name, value in made.items()},
                form,
            )


def grouped(fused_mlp, architecture: str) -> int:
    """Runs the calls of experts() on an architecture's kernels; returns their number."""
    calls = 0
    with gemm_kernels.forced(fused_mlp, architecture), torch.no_grad():
        for made, form in experts(architecture):
            shapes = ", ".join(f"{name} {list(operand.shape)}" for name, operand in made.items())
            print(f"{architecture}: experts_mlp: {shapes}, {made['x'].dtype}, {form}", flush=True)
            assert all(part.fused for part in fused_mlp.explain(fused_mlp.experts_mlp, **made, **form).parts)
            fused_mlp.experts_mlp(**made, **form)
            torch.cuda.synchronize()
            calls += 1
    return calls


def trained_experts(ops, fused_mlp) -> int:
    """Trains experts on each architecture: few, many and no rows per expert, feature tails; returns the call count."""
    found = [each for each in gemm_kernels.ARCHITECTURES if gemm_kernels.runs_on(each, CAPABILITY)]
    calls = 0
    for architecture in found:
        with gemm_kernels.forced(fused_mlp, architecture):
            calls += _trained_experts(ops, architecture)
    return calls


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _trained_experts(ops, architecture: str) -> int:
    cases = list(itertools.product(((5, 2, 4), (300, 3, 5), (900, 2, 3)), (torch.bfloat16, torch.float16)))
    for (tokens, k, experts), dtype in cases:
        print(f"{architecture}: training of experts: {tokens} tokens, {k} of {experts}, {dtype}", flush=True)
        index = torch.randint(-1, experts + 1, (tokens, k), device="cuda")
        x, first, second = (
            torch.randn(size, device="cuda").to(dtype)
            for size in ((tokens, 328), (experts, 400, 328), (experts, 328, 200))
        )
        routed = index, torch.rand(tokens, k, device="cuda"), first, second
        # Adapters are laid out as PEFT keeps them, in either dtype, with ranks with and without a tail.
        rank, kind = (5, torch.float32) if tokens == 300 else (16, dtype)
        sizes = ((experts, rank, 328), (400, rank, experts), (experts, rank, 200), (328, rank, experts))
        factors = [torch.randn(size, device="cuda").to(kind) for size in sizes]
        factors = [factor.permute(2, 0, 1) if place % 2 else factor for place, factor in enumerate(factors)]
        nothing, form = (None, None), (4, True, False, False, None, 0.0)
        for adapters, bits in (([None] * 4, 15), (factors, 255)):
            if adapters is factors and architecture != "sm90":
                continue  # only sm90 has kernels that add the terms of adapters
            _, sorted_x, gate_up, *rows = ops.experts_training_forward(
                x, *routed, *nothing, adapters, [0.5, 2.0], *form, True
            )
            kept = torch.ones_like(x), sorted_x, gate_up, *routed, *nothing, adapters, [0.5, 2.0]
            kept = *kept, rows[0] if rows else None, *form, bits
            ops.experts_training_backward(*kept)
            ops.experts_training_backward(kept[0], x, *kept[2:-1], bits & ~4 | 1 << 12)
            ops.experts_training_backward_(*kept)
        if architecture == "sm90":
            ops.adapted_experts(x, *routed, *nothing, factors, [0.5, 2.0], 4, True, False, False, None, 0.0)
        # As in gpt-oss: transposed, interleaved, with biases and limits; and without a gate.
        biases = (torch.randn(experts, size, device="cuda").to(dtype) for size in (400, 328))
        lying = index, routed[1], first.mT.contiguous(), second.mT.contiguous(), *biases
        alone = index, routed[1], first[:, :200], second, *nothing
        for given, adapters, form, bits in (
            (lying, [None] * 4, (3, True, True, True, 0.7, 1.0), 783),
            (lying, factors, (3, True, True, True, 0.7, 1.0), 1023),
            (alone, [None] * 4, (4, False, False, False, None, 0.0), 15),
        ):
            if adapters is factors and architecture != "sm90":
                continue
            _, *kept = ops.experts_training_forward(x, *given, adapters, [0.5, 2.0], *form, True)
            sorted_x, gate_up, *rows = kept
            kept = torch.ones_like(x), sorted_x, gate_up, *given, adapters, [0.5, 2.0], rows[0] if rows else None
            ops.experts_training_backward(*kept, *form, bits)
            *_, sums = ops.experts_training_backward(*kept, *form, 1 << 10)  # in two calls, as in a graph
            ops.experts_training_backward(*kept[:2], sums, *kept[3:], *form, 5 | 1 << 11)
            ops.experts_training_backward_(*kept, *form, bits)
        torch.cuda.synchronize()
    return 2 * len(cases)


def routers(op) -> int:
    """Calls the router, behind cuBLAS's product; returns the number of calls."""
    cases = list(
        itertools.product((1, 5, 130), ((3, 3), (33, 8), (128, 8), (512, 32)), (torch.float32, torch.bfloat16))
    )
    for rows, (experts, top_k), dtype in cases:
        print(f"top_k_router: {rows} rows, {top_k} of {experts} experts, {dtype}", flush=True)
        x, weight = (torch.randn(size, 64, device="cuda").to(dtype) for size in (rows, experts))
        for narrow in (False, True):
            op(x, weight, top_k, narrow, narrow)
        torch.cuda.synchronize()
    return 2 * len(cases)


def sigmoid_routers(op) -> int:
    """Calls the sigmoid router, with its own product or with cuBLAS's behind casts; returns the number of calls."""
    cases = list(
        itertools.product(
            (1, 5, 130),
            ((6, 6, 3, 3), (64, 8, 32, 9), (256, 8, 8, 4), (510, 32, 1, 1)),
            (torch.float32, torch.bfloat16),
        )
    )
    for rows, (experts, *numbers), dtype in cases:
        print(f"sigmoid_router: {rows} rows, {numbers} of {experts} experts, {dtype}", flush=True)
        x, weight = (torch.randn(size, 264, device="cuda").to(dtype) for size in (rows, experts))
        op(x, weight, torch.randn(experts, device="cuda"), *numbers, True, 2.5)
        torch.cuda.synchronize()
    return len(cases)


def blocks(op, fused_mlp, by_cublas: bool) -> int:
    """Calls the block's op: one warp or one block of threads per row, vectors and elements, rows too long for
    registers. A norm's weight is shared by all rows or differs per row. Unless `by_cublas`, calls whose product is
    cuBLAS's are skipped. Returns the number of calls.
    """
    count = 0
    for rows, n_in, features in (*((m, k, n) for m, k, n in PLAIN if m * n < 400_000), (5, 72, 77), (3, 40, 9001)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, weight, residual, norm, bias = (
                torch.randn(size, device="cuda").to(dtype)
                for size in ((rows, n_in), (features, n_in), (rows, features + 8), (features,), (features,))
            )
            plan = fused_mlp.explain(fused_mlp.linear, x, weight, bias, None).parts
            if not by_cublas and not all(part.fused for part in plan):
                continue
            print(f"residual_mlp: {rows}, {n_in}, {features}, {dtype}", flush=True)
            scale, shift = torch.randn(rows, 2 * features, device="cuda").to(dtype).chunk(2, dim=-1)
            norms = [(None, None, 0, False), (norm, bias, 1, True), (norm, None, 2, True), (norm, bias, 1, False)]
            norms += [(norm, None, 2, False), (norm, None, 4, False), (scale, None, 4, False)]
            norms += [(scale, shift, 5, of_sum) for of_sum in (False, True)]
            for view in (residual[:, :features], residual[:, 3 : features + 3], residual[:, 8:].contiguous()):
                for weights, biases, code, of_sum in norms:
                    last = (weights, biases, 1e-5, code)
                    op(x, None, weight, None, bias, 0, view, 0.5, None, None, 0.0, 0, *last, of_sum)
                    torch.cuda.synchronize()
                    count += 1
    return count


def norms(ops) -> int:
    """Runs standalone norms, forward and backward, with shared and with wider weights; returns the number of calls."""
    shapes = ((7, 33), (3, 64), (300, 1000), (700, 128), (9, 12288), (2049, 16))
    cases = list(itertools.product(shapes, DTYPES, (1, 2, 3, 5)))
    for (rows, features), dtype, kind in cases:
        print(f"norm: {rows}, {features}, {dtype}, {kind}", flush=True)
        x, grad, residual = (torch.randn(rows, features, device="cuda").to(dtype) for _ in range(3))
        weight, bias = torch.randn(2, features, device="cuda").to(dtype)
        bias = bias if kind in (1, 5) else None
        _, statistics = ops.norm_forward(x, weight, bias, 1e-5, kind, False)
        for added in (None, residual):
            ops.norm_backward(grad, x, weight, statistics, added, None, 0.0, kind, 3 if bias is None else 7)
        for dropout in (0.0, 0.3):
            _, total, statistics, *kept = ops.sum_norm_forward(x, residual, weight, bias, 1e-5, kind, dropout)
            mask, needs = (kept[0], 27) if kept else (None, 19)
            needs |= 0 if bias is None else 4
            ops.norm_backward(grad, total, weight, statistics, None, mask, dropout, kind, needs)
        torch.cuda.synchronize()
    return 7 * len(cases)


def attentions(ops) -> int:
    """Runs projections of one input and rotary embeddings both ways, by vector and element; returns the call count."""
    heads, layers = (
        ((3, 4, 2, 9, 64), (1, 3, 1, 70, 6), (2, 40, 8, 5, 128)),
        ((70, 40, (72, 24, 8)), (5, 33, (9, 17, 3))),
    )
    for dtype in DTYPES:
        for batch, queries, keys, tokens, features in heads:
            print(f"rotary: {batch}, {queries}, {keys}, {tokens}, {features}, {dtype}", flush=True)
            q, k = (torch.randn(batch, tokens, n, features, device="cuda").to(dtype) for n in (queries, keys))
            angles = [torch.randn(1, tokens, features, device="cuda").to(dtype) for _ in range(2)]
            for inverse in (False, True):
                ops.rotary(q.transpose(1, 2), k.transpose(1, 2), *angles, inverse)
        for rows, width, outs in layers:
            print(f"projections: {rows}, {width}, {outs}, {dtype}", flush=True)
            x, *weights = (torch.randn(n, width, device="cuda").to(dtype) for n in (rows, *outs))
            grads = ops.projections_forward(x, *weights, *(weight[:, 0].contiguous() for weight in weights))
            ops.projections_backward(*grads, x, *weights, 127)
        torch.cuda.synchronize()
    return len(DTYPES) * 2 * (len(heads) + len(layers))


def adapted(fused_mlp) -> int:
    """Runs layers with low-rank adapters both ways, with and without dropout; returns the number of calls."""
    shapes = ((5, 136, 264), (40, 320, 192), (300, 520, 776), (1300, 520, 1032), (1301, 288, 1056))
    cases = list(itertools.product(shapes, (8, 24), (torch.bfloat16, torch.float16), (0.0, 0.3)))
    for (rows, width, hidden), rank, dtype, dropout in cases:
        print(f"adapters: {rows}, {width}, {hidden}, rank {rank}, {dtype}, dropout {dropout}", flush=True)

        def drawn(*sizes, dtype=dtype):
            return (torch.randn(sizes, device="cuda") / 8).to(dtype).requires_grad_()

        x, weights = drawn(rows, width), [drawn(hidden, width), drawn(hidden, width), drawn(width, hidden)]
        adapters = [
            fused_mlp.Adapter(drawn(rank, n_in), drawn(n_out, rank), 2.0, None, dropout)
            for n_out, n_in in map(torch.Tensor.size, weights)
        ]
        named = dict(zip(("gate_adapter", "up_adapter", "down_adapter"), adapters, strict=True))
        frozen = [weight.detach() for weight in weights]
        with torch.no_grad():
            fused_mlp.gated_mlp(x, *frozen, activation="silu", **named)
        result = fused_mlp.gated_mlp(x, *frozen, activation="silu", **named)
        leaves = [x, *(matrix for adapter in adapters for matrix in adapter[:2])]
        torch.autograd.grad(result, leaves, torch.ones_like(result))
        torch.cuda.synchronize()
    return 3 * len(cases)


QUANTIZED = "nf4", "nested", "fp8", "fp8 lower blocks", "fp8 rows", "int8", "int4", "int4 tiles"


def quantized_weight(fused_mlp, kind: str, n: int, k: int):
    """A random weight in a format."""
    if kind.startswith("fp8"):
        block = {"fp8": (128, 128), "fp8 lower blocks": (64, 128), "fp8 rows": (1, k)}[kind]
        scales = torch.rand(-(-n // block[0]), -(-k // block[1]), device="cuda")
        values = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        return fused_mlp.QuantizedWeight.from_fp8(values, scales, block)
    if kind == "int8":
        values = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
        return fused_mlp.QuantizedWeight.from_int8(values, torch.rand(n, device="cuda"), divisor=127)
    if kind == "int4 tiles":
        words = torch.randint(1 << 31, (n // 8, -(-k // 128), 32, 4), dtype=torch.int32, device="cuda")
        pairs = torch.randn(words.shape[1] * 2, n, 2, device="cuda").bfloat16()
        return fused_mlp.QuantizedWeight.from_int4_tiles(words, pairs, (n, k), 64)
    data = torch.randint(256, (n * k // 2, 1), dtype=torch.uint8, device="cuda")
    blocks = n * k // 64
    if kind == "int4":
        return fused_mlp.QuantizedWeight.from_int4(data.view(n, -1), torch.rand(n, k // 64, device="cuda"))
    if kind == "nf4":
        return fused_mlp.QuantizedWeight(data, torch.rand(blocks, device="cuda"), (n, k))
    scales = torch.randint(256, (blocks,), dtype=torch.uint8, device="cuda")
    of_scales = torch.rand(-(-blocks // 256), device="cuda"), torch.rand(256, device="cuda")
    return fused_mlp.QuantizedWeight(data, scales, (n, k), "nf4", 64, *of_scales, 256, 0.5)


def quantized(fused_mlp) -> int:
    """Runs quantised weights: few rows streamed, more tiled, many decoded or rounded to FP8; returns the call count."""
    rows, shapes = (1, 7, 16, 30, 33, 100, 300, 600), ((128, 320), (576, 64))
    cases = list(itertools.product(rows, shapes, DTYPES, QUANTIZED))
    for rows, (width, hidden), dtype, kind in cases:
        print(f"quantised weights: {rows}, {width}, {hidden}, {dtype}, {kind}", flush=True)

        def made(n, k, kind=kind):
            return quantized_weight(fused_mlp, kind, n, k)

        x, weights = torch.randn(rows, width, device="cuda").to(dtype), (made(hidden, width), made(hidden, width))
        with torch.no_grad():
            fused_mlp.gated_mlp(x, *weights, made(width, hidden), activation="silu")
            fused_mlp.linear(x, weights[0], None, activation="gelu")
        torch.cuda.synchronize()
    return 2 * len(cases)


def quantized_stack(fused_mlp, kind: str, experts: int, n: int, k: int):
    """Random weights of experts in a format."""
    if kind == "fp8":
        values = torch.randn(experts, n, k, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.rand(experts, -(-n // 128), -(-k // 128), device="cuda")
        return fused_mlp.QuantizedStack.from_fp8(values, scales)
    codes = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8, device="cuda")
    return fused_mlp.QuantizedStack.from_mxfp4(codes, torch.full((experts, n, k // 32), 120, device="cuda").byte())


def quantized_experts(fused_mlp) -> int:
    """Runs FP8 and MXFP4 experts of few and of more rows, and their decoding; returns the number of calls."""
    cases = list(itertools.product((1, 5, 20, 90, 200), ((128, 320), (576, 64), (96, 160)), ("fp8", "mxfp4")))
    for tokens, (width, hidden), kind in cases:
        print(f"quantised experts: {tokens}, {width}, {hidden}, {kind}", flush=True)

        def made(n, k, kind=kind):
            return quantized_stack(fused_mlp, kind, 6, n, k)

        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        index = torch.randint(-1, 7, (tokens, 3), device="cuda")
        biases = torch.randn(6, 2 * hidden, device="cuda"), torch.randn(6, width, device="cuda").bfloat16()
        given = x, index, torch.rand(tokens, 3, device="cuda"), made(2 * hidden, width), made(width, hidden), *biases
        with torch.no_grad():
            fused_mlp.experts_mlp(*given, limit=7.0, up_offset=1.0, interleaved=kind == "mxfp4")
        torch.cuda.synchronize()
    return len(cases)


def run(tool: str):
    """Runs all calls one by one, each announced so that the sanitizer's reports follow it; returns the package."""
    from kernels import get_kernel

    fused_mlp = get_kernel(project.repo_id(), version=project.version(), backend="cuda")
    native = sys.modules[f"{fused_mlp.__name__}.backends.native"]
    calls = 0
    with fused_mlp.backend("cuda"):
        for architecture in gemm_kernels.ARCHITECTURES:
            if not gemm_kernels.runs_on(architecture, torch.cuda.get_device_capability()):
                continue
            for function, made, activation in gemms_of(architecture, fused_mlp):
                explanation = fused_mlp.explain(getattr(fused_mlp, function), **made, activation=activation)
                if tool == "racecheck" and not all(part.fused for part in explanation.parts):
                    continue  # cuBLAS's kernels fault next to kernels instrumented by racecheck
                shapes = ", ".join(f"{name} {list(operand.shape)}" for name, operand in made.items())
                print(f"{architecture}: {function}: {shapes}, {made['x'].dtype}, {activation}", flush=True)
                getattr(fused_mlp, function)(**made, activation=activation)
                torch.cuda.synchronize()
                calls += 1
        for architecture in gemm_kernels.ARCHITECTURES:
            if gemm_kernels.runs_on(architecture, torch.cuda.get_device_capability()):
                calls += grouped(fused_mlp, architecture)
        calls += trained_experts(native, fused_mlp)
        calls += norms(native) + attentions(native) + quantized(fused_mlp) + quantized_experts(fused_mlp)
        if tool != "racecheck":  # cuBLAS's kernels fault next to those it instruments
            calls += adapted(fused_mlp)
        calls += biases(native)
        calls += blocks(native.residual_mlp, fused_mlp, by_cublas=tool != "racecheck")
        if tool != "racecheck":
            calls += routers(native.top_k_router) + sigmoid_routers(native.sigmoid_router)
        for architecture, kernel, kind in training_kernels():
            with gemm_kernels.forced(fused_mlp, architecture, kernel):
                for what, call in training(fused_mlp, by_cublas=tool != "racecheck"):
                    if not what.startswith(kind):
                        continue
                    print(f"{architecture}, kernel {kernel}: {what}", flush=True)
                    call()
                    torch.cuda.synchronize()
                    calls += 1
        for gate, up, activation in pointwise():
            print(f"act_and_mul: {list(gate.shape)} by {gate.stride()}, {gate.dtype}, {activation}", flush=True)
            leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
            result = fused_mlp.act_and_mul(*leaves, activation)
            torch.autograd.grad(result, leaves, torch.ones_like(result))
            torch.cuda.synchronize()
            calls += 1
    print(f"{calls} calls")
    return fused_mlp


def start(sanitizer: str, tool: str) -> subprocess.Popen:
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=1"]
    command += ["--kernel-name=kns=fused_mlp", "--report-api-errors=no"]  # torch's own kernels are not checked
    command += [sys.executable, __file__, tool]
    # Each tensor gets an allocation of its own, so that an access beyond it is outside of all allocations.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    if machine.device_type() != "cuda":
        sys.exit("sanitize needs a GPU and a torch with CUDA")
    nvcc = toolchain.nvcc()
    folders = [os.environ.get("PATH", ""), *([str(Path(nvcc.path).parent)] if nvcc else [])]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if sanitizer is None:
        sys.exit("sanitize needs compute-sanitizer (of the CUDA toolkit) on the PATH")
    begin = time.monotonic()
    failed = []
    for tool, process in {tool: start(sanitizer, tool) for tool in TOOLS}.items():
        output, _ = process.communicate()
        seconds = time.monotonic() - begin
        if process.returncode == 0:
            print(f"{tool}: clean, {seconds:.0f} s, {' '.join(output.splitlines()[-2:])}")
        else:
            print(f"{output}{tool}: FAILED, {seconds:.0f} s")
            failed.append(tool)
    if failed:
        sys.exit(f"{', '.join(failed)} found errors")


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
