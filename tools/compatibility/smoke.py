"""Loads the kernel and tests its main functions under the torch of the running interpreter.

Run by its path in its own process: `smoke.py <repo id> <version> <backend>`. Prints one JSON object with each test and
None if it passed, or the error. Without a GPU, the CUDA variant is loaded and computes nothing.
"""

import json
import sys
from collections.abc import Callable

import torch
from kernels import get_kernel
from torch import nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 176, bias=False), nn.Linear(64, 176, bias=False)
        self.down_proj, self.act_fn = nn.Linear(176, 64, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def operands(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((5, 64), (176, 64), (176, 64), (64, 176))
    return [(torch.randn(shape, device=device) * shape[1] ** -0.5).to(dtype) for shape in shapes]


def exact(x, gate, up, down):
    return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((result.double() - expected).norm() / expected.norm()).item()
    if not error < 4 * torch.finfo(result.dtype).eps:
        raise AssertionError(f"relative error {error:.1e} in {result.dtype}")


def forward(fused_mlp, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = operands(device, dtype)
        close(fused_mlp.gated_mlp(*given, activation="silu"), exact(*(tensor.double() for tensor in given)))


def backward(fused_mlp, device: str) -> None:
    given = [tensor.requires_grad_() for tensor in operands(device, torch.float32)]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    got = torch.autograd.grad(fused_mlp.gated_mlp(*given, activation="silu").sum(), given)
    expected = torch.autograd.grad(exact(*wide).sum(), wide)
    for one, other in zip(got, expected, strict=True):
        close(one, other)


def compiled(fused_mlp, device: str) -> None:
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    function = torch.compile(
        lambda *given: fused_mlp.gated_mlp(*given, activation="silu"), fullgraph=True, backend=compiler
    )
    given = operands(device, torch.float32)
    with torch.no_grad():
        close(function(*given), exact(*(tensor.double() for tensor in given)))
    if not any("gated_mlp" in str(node.target) for graph in graphs for node in graph.graph.nodes):
        raise AssertionError("a compiled call does not run our op")


def fused(fused_mlp, device: str) -> None:
    module, x = MLP().to(device).eval(), torch.randn(5, 64, device=device)
    with torch.no_grad():
        expected = module(x)
        if not fused_mlp.fuse_mlps(module).fused:
            raise AssertionError("the MLP was not fused")
        close(module(x), expected.double())


def error_of(trial: Callable[[], object]) -> str | None:
    try:
        trial()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> None:
    repo_id, version, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    loaded = []
    found = {"load": error_of(lambda: loaded.append(get_kernel(repo_id, version=version, backend=backend)))}
    device = "cuda" if backend == "cuda" else "cpu"
    if loaded and (device == "cpu" or torch.cuda.is_available()):
        for trial in (forward, backward, compiled, fused):
            found[trial.__name__] = error_of(lambda trial=trial: trial(loaded[0], device))
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "found": found}))


if __name__ == "__main__":
    main()
