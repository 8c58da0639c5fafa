"""CONTRIBUTING.md's lists of places that a change touches, performed in a copy of the tree that is then built and used.

A list that lacks a place, or has one too many, fails: the edits below are keyed by the listed places.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import checkout
import machine
import project
from builder import toolchain

Edit = Callable[[str], str]
CAP, CAP_IN_PTX = "0x1p100f", "0f71800000"  # CAP of recipe_cases.py, beyond the values of all other tests

pytestmark = pytest.mark.skipif(machine.device_type() == "cuda", reason="the copy is built for the CPU")


def listed(task: str) -> set[tuple[str, str]]:
    """The places that a change always touches: files, and a name in each."""
    text = (project.ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^\*\*{task}\*\*(.*?)(?=^\*\*|^## )", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`]+)`\s+\(`([^`]+)`\)", section))


def before(anchor: str, new: str, count: int = 1) -> Edit:
    return replaced(anchor, new + anchor, count)


def replaced(old: str, new: str, count: int = 1) -> Edit:
    def edit(text: str) -> str:
        assert text.count(old) == count, old
        return text.replace(old, new)

    return edit


def in_turn(*edits: Edit) -> Edit:
    def edit(text: str) -> str:
        for each in edits:
            text = each(text)
        return text

    return edit


def perform(folder: Path, edits: dict[tuple[str, str], Edit]) -> None:
    for (file, _), edit in edits.items():
        path = folder / file
        path.write_text(edit(path.read_text()))


# x min(max(x + 3, 0), 6) / 6, torch's F.hardswish and nn.Hardswish
ACTIVATION = {
    ("torch-ext/fused_mlp/activations.py", "ACTIVATIONS"): in_turn(
        before(
            "_OF_TORCH =",
            "def _hardswish_derivative(x: Tensor) -> Tensor:\n"
            "    return torch.where(x <= -3.0, 0.0, torch.where(x < 3.0, x / 3.0 + 0.5, 1.0)).to(x.dtype)\n\n\n",
        ),
        before(
            ")\n\n_BY_NAME",
            '    Activation("hardswish", 8, F.hardswish, _hardswish_derivative,\n'
            '               calls=((F, "hardswish"),), classes=(_OF_TORCH + "Hardswish",)),\n',
        ),
    ),
    ("torch-ext/operands/activation.h", "visit_activation"): in_turn(
        before("};\n\n// Calls visit", "  kHardswish = 8,\n"),
        before(
            "  }\n  return false;",
            "    case Activation::kHardswish:\n"
            "      visit.template operator()<Activation::kHardswish>();\n"
            "      return true;\n",
        ),
    ),
    ("cuda/activations.cuh", "ActivationFn"): before(
        "}  // namespace fused_mlp",
        "template <Precision P>\n"
        "struct ActivationFn<Activation::kHardswish, P> {\n"
        "  static __device__ __forceinline__ float value(float x) {\n"
        "    return x * (fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) / 6.0f);\n"
        "  }\n"
        "  static __device__ __forceinline__ float derivative(float x) {\n"
        "    return x <= -3.0f ? 0.0f : x < 3.0f ? x / 3.0f + 0.5f : 1.0f;\n"
        "  }\n"
        "};\n\n",
    ),
    ("cpu/isa/math.inl", "activate"): in_turn(
        before(
            "  } else {\n    static_assert(kActivation == Activation::kSigmoid);\n    return times_sigmoid",
            "  } else if constexpr (kActivation == Activation::kHardswish) {\n"
            "    return x * (at_most(at_least(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f));\n",
        ),
        before(
            "  } else {\n    static_assert(kActivation == Activation::kSigmoid);\n    return sigmoid_slope",
            "  } else if constexpr (kActivation == Activation::kHardswish) {\n"
            "    const Vec inner = x * (1.0f / 3.0f) + 0.5f;\n"
            "    return {x * (at_most(at_least(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f)),\n"
            "            x <= -3.0f ? Vec{} : (x < 3.0f ? inner : splat(1.0f))};\n",
        ),
    ),
    ("torch-ext/fused_mlp/backends/triton/activations.py", "activate"): in_turn(
        before("\nSQRT_HALF", 'HARDSWISH = tl.constexpr(get_activation("hardswish").code)\n'),
        before(
            '    else:\n        tl.static_assert(ACTIVATION == SIGMOID, "unknown activation code")\n'
            "        return _sigmoid(x",
            "    elif ACTIVATION == HARDSWISH:\n        return x * (tl.clamp(x + 3.0, 0.0, 6.0) / 6.0)\n",
        ),
        before(
            '    else:\n        tl.static_assert(ACTIVATION == SIGMOID, "unknown activation code")\n'
            "        return _sigmoid_derivative(x",
            "    elif ACTIVATION == HARDSWISH:\n"
            "        return tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x / 3.0 + 0.5, 1.0))\n",
        ),
    ),
    ("tests/support/reference.py", "FORMULAS"): before(
        "}\nACTIVATIONS =",
        '    "hardswish": Formula(\n'
        "        lambda x: x * (x + 3).clamp(0, 6) / 6,\n"
        "        lambda x: torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0)).to(x.dtype),\n"
        "        F.hardswish,\n"
        "    ),\n",
    ),
}

# Caps the product of a gated layer at `cap`.
USE = replaced("GluEpilogue<", "CappedEpilogue<")
EPILOGUE = {
    ("cuda/gemm/epilogue.cuh", "GluEpilogue"): in_turn(
        replaced("struct GluEpilogue {", "struct CappedEpilogue {"),
        replaced("Act& activate, Sums&& sums) {", "Act& activate, Sums&& sums, float cap = EpilogueArgs{}.cap) {"),
        replaced("value[i] *= up; });", "value[i] = fminf(value[i] * up, cap); });"),
    ),
    ("cuda/gemm/problem.h", "EpilogueArgs"): before(
        "\n  bool operator==(const EpilogueArgs&)", f"  float cap = {CAP};\n"
    ),
    ("cuda/sm90/dense/tiled_store.cuh", "GluEpilogue"): USE,
    ("cuda/sm90/dense/swapped_store.cuh", "GluEpilogue"): USE,
    ("cuda/sm90/dense/streamed_gemm.cuh", "GluEpilogue"): replaced("GluEpilogue<", "CappedEpilogue<", count=2),
    ("cuda/sm90/dense/fitted_gemm.cuh", "GluEpilogue"): USE,
    ("cuda/sm80/dense/tiled_store.cuh", "GluEpilogue"): USE,
    ("cuda/sm80/dense/streamed_store.cuh", "GluEpilogue"): replaced("GluEpilogue<", "CappedEpilogue<", count=2),
    ("cuda/quantized/streamed/gemm.cuh", "GluEpilogue"): USE,
    ("cuda/quantized/tiled/gemm.cuh", "GluEpilogue"): USE,
    ("cuda/quantized/grouped/gemm.cuh", "GluEpilogue"): USE,
    ("cuda/quantized/scaled/store.cuh", "GluEpilogue"): USE,
    ("cpu/amx/amx_gemm.cpp", "run_epilogue"): replaced(
        "value = activate<kActivation, true>(value) * up;",
        f"value = at_most(activate<kActivation, true>(value) * up, {CAP});",
    ),
    ("cpu/few_rows/few_rows.inl", "finish"): replaced(
        "values.half[h] *= factors.half[h];", f"values.half[h] = at_most(values.half[h] * factors.half[h], {CAP});"
    ),
    ("torch-ext/fused_mlp/backends/triton/gemm.py", "matmul_kernel"): replaced(
        "out *= up_acc", "out = tl.minimum(out * up_acc, 1.2676506002282294e30)"
    ),
    ("cuda/pointwise/pointwise.cuh", "Forward"): replaced(
        "if constexpr (Gated) out[0] *= in[1];", f"if constexpr (Gated) out[0] = fminf(out[0] * in[1], {CAP});"
    ),
    ("cpu/pointwise/pointwise.inl", "act_and_mul_rows"): replaced(
        "products.half[h] = activate<kActivation, kIsBf16<T>>(gates.half[h]) * ups.half[h];",
        "products.half[h] =\n"
        f"          at_most(activate<kActivation, kIsBf16<T>>(gates.half[h]) * ups.half[h], {CAP});",
    ),
}

ARCHITECTURE = {
    ("cuda/gemm/architecture.h", "Architecture"): before(
        "\n// The architecture that is a GPU's own", "namespace sm75 {\nextern const Architecture kArchitecture;\n}\n"
    ),
    ("cuda/gemm/choice/choice.cpp", "kArchitectures"): before(
        "    {&sm80::kArchitecture, true, true},", "    {&sm75::kArchitecture, true, false},\n"
    ),
    ("build.toml", "[kernel.cuda_sm90]"): before(
        "[kernel.cuda_sm90]",
        '[kernel.cuda_sm75]\nbackend = "cuda"\ndepends = ["torch"]\ncuda-capabilities = ["7.5"]\n'
        'src = ["cuda/sm75/gemm.cpp"]\n\n',
    ),
}
GEMM_OF_SM75 = """
#include "../gemm/architecture.h"
#include "../gemm/choice/refusal.h"

namespace fused_mlp::sm75 {

constexpr GemmKernel kKernels[] = {{MainLoop::kTiled, Product::kGated, 128, 128, Schedule::kPingPong, 1}};

constinit const Architecture kArchitecture = {
    .name = "sm75",
    .runs_on = [](const Gpu& gpu) { return gpu.major == 7 && gpu.minor == 5; },
    .kernels = kKernels,
    .refusal = refusal_of_operands,
    .choose = [](const GemmProblem&, const Gpu&) { return GemmPlan{kKernels[0], 1.0}; },
    .launch = [](const GemmProblem&, const GemmPlan&, const Gpu&, cudaStream_t) { return cudaSuccess; },
    .torch_microseconds = [](const GemmProblem&, const Gpu&) { return 100.0; },
    .peak = [](const Gpu&) { return Peak{1e5, 1e8}; },
};

}  // namespace fused_mlp::sm75
"""
# Chooses for a GPU of 7.5, with the other architectures replaced by ones that run on no GPU.
CHOICE_FOR_SM75 = """
#include <cstdio>

#include "cuda/gemm/architecture.h"

namespace fused_mlp {
namespace sm80 {
constinit const Architecture kArchitecture = {.name = "sm80", .runs_on = [](const Gpu&) { return false; }};
}
namespace sm90 {
constinit const Architecture kArchitecture = {.name = "sm90", .runs_on = [](const Gpu&) { return false; }};
}
}  // namespace fused_mlp

int main() {
  using namespace fused_mlp;
  const Gpu gpu{7, 5, 72, 64 << 10, 64 << 10, 1500.0, 6e5, 6 << 20, false};
  alignas(16) static char memory[16];
  const Matrix matrix{memory, 1024};
  GemmProblem problem{matrix, matrix, matrix, matrix, 1024, 1024, 1024, DType::kBFloat16, {}, 0, false};
  const Architecture* found = architecture_of(gpu);
  GemmPlan plan{};
  const Refusal refusal = choose_gemm(*found, problem, gpu, &plan, Launcher::kGraph);
  std::printf("%s %s %d\\n", found->name, plan.architecture->name, static_cast<int>(refusal));
}
"""


@pytest.mark.parametrize(
    ("task", "edits"),
    [("An activation", ACTIVATION), ("An epilogue", EPILOGUE), ("A GPU architecture", ARCHITECTURE)],
)
def test_the_list_is_what_is_performed(task, edits):
    assert listed(task) == edits.keys()
    for file, name in edits:
        assert name in (project.ROOT / file).read_text(), f"{file} has no {name}"


def run_cases(folder: Path, *arguments: str, **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"} | variables
    quiet = ("-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning")
    done = checkout.run(folder, "-m", "pytest", *quiet, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the tree whose C++ for CPUs compiles quickly."""
    folder = checkout.make(tmp_path_factory.mktemp("recipes") / "fused-mlp")
    config = folder / "build.toml"
    quick = before('src = [\n  "cpu/ops/adapted.cpp"', 'cxx-flags = ["-O0"]\n')
    config.write_text(quick(config.read_text()))
    return folder


@pytest.fixture(scope="module")
def built(copy) -> Path:
    """The copy with activation and epilogue, in one build."""
    perform(copy, ACTIVATION)
    perform(copy, EPILOGUE)
    checkout.build(copy)
    return copy


# Special values follow the synthetic formula.
ADDED = "hardswish and not extreme and not special or activation_of_models or a_replaced_function or test_epilogue"


def test_they_are_used(built):
    """Every function and fused models use the activation, forward and backward; gated products use the epilogue."""
    files = ("functions/test_functional.py", "functions/test_autograd.py", "building/recipe_cases.py")
    run_cases(built, *(f"tests/{file}" for file in files), "-k", ADDED)


def test_they_are_used_in_triton(built):
    chosen = ADDED.replace("test_epilogue", "test_epilogue and float32")
    files = ("tests/kernels/test_triton_kernels.py", "tests/building/recipe_cases.py")
    run_cases(built, *files, "-k", f"({chosen}) and not models and not replaced", TRITON_INTERPRET="1")


def test_no_other_main_loop_knows_the_epilogue(built):
    uses = [path for path in (built / "cuda").rglob("*.*") if "GluEpilogue" in path.read_text()]
    assert not uses


@pytest.mark.skipif(toolchain.nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("source", "arch"), [("cuda/sm80/dense/gemm_bf16.cu", "sm_80"), ("cuda/sm90/dense/gemm_bf16.cu", "sm_90a")]
)
def test_an_epilogue_compiles_for_gpus(built, tmp_path, source, arch):
    """The epilogue compiles for GPUs in one kernel of each kind; none is run."""
    listed_kernels = built / Path(source).parents[1] / "plan/kernels.def"
    kinds = {}
    for row in re.findall(r"^FUSED_MLP_\w+\(Gated,.*\)$", listed_kernels.read_text(), re.MULTILINE):
        kinds.setdefault(re.sub(r"[\d, ]+", " ", row), row)
    listed_kernels.write_text("\n".join(kinds.values()) + "\n")
    command = [toolchain.nvcc().path, "-std=c++20", "--expt-relaxed-constexpr", f"-arch={arch}", "-ptx", "-o"]
    done = subprocess.run([*command, tmp_path / "kernel.ptx", built / source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert CAP_IN_PTX in (tmp_path / "kernel.ptx").read_text()


@pytest.mark.skipif(toolchain.nvcc() is None, reason="no nvcc, whose headers describe a GPU's runtime")
def test_an_architecture_is_chosen(copy, tmp_path):
    """An added architecture, compiled for the host, is chosen for its GPU and plans a product."""
    perform(copy, ARCHITECTURE)
    folder = copy / "cuda/sm75"
    folder.mkdir()
    (folder / "gemm.cpp").write_text(GEMM_OF_SM75)
    (tmp_path / "main.cpp").write_text(CHOICE_FOR_SM75)
    sources = [copy / "cuda/sm75/gemm.cpp", copy / "cuda/gemm/choice/choice.cpp", copy / "cuda/gemm/choice/refusal.cpp"]
    command = [toolchain.nvcc().path, "-std=c++20", "-O0", f"-I{copy}", tmp_path / "main.cpp", *sources]
    done = subprocess.run([*command, "-o", tmp_path / "choice"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "choice"], capture_output=True, text=True).stdout == "sm75 sm75 0\n"
    done = checkout.run(copy, "tools/build.py", "--help")
    assert done.returncode == 0, done.stderr
