"""The package as it ships: its exports, and its behaviour in users' processes."""

import os
import re
from pathlib import Path

import pytest
import torch

import checkout
import forks
import machine
import modules
import project
import reference
from builder import toolchain

ROOT = Path(__file__).parents[2]


def environment(**more):
    """Only the variables that Python needs, and the given ones."""
    needed = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "OMP_NUM_THREADS", "FUSED_MLP_TEST_SEED")
    return {name: os.environ[name] for name in needed if name in os.environ} | more


def local_kernels():
    return f"{project.repo_id()}={machine.build_folder().resolve()}"


def test_exports_are_described(fused_mlp):
    assert all(getattr(fused_mlp, name).__doc__ for name in fused_mlp.__all__)
    assert all(getattr(fused_mlp.layers, name).__doc__ for name in fused_mlp.layers.__all__)


def test_folders():
    """Folders have at most ten files; those of ``models`` import only from rows above theirs in the README's table."""
    package = ROOT / "torch-ext" / project.python_name()
    assert all(len(list(folder.glob("*.py"))) <= 10 for folder in (package, *filter(Path.is_dir, package.rglob("*"))))
    models = package / "models"
    floors = re.findall(r"^\| `(\w+)/` \|", (models / "README.md").read_text(), re.MULTILINE)
    assert sorted(floors) == sorted(place.parent.name for place in models.glob("*/__init__.py"))
    for floor, name in enumerate(floors):
        for file in (models / name).glob("*.py"):
            imported = re.findall(r"^ *from \.\.(\w+)", file.read_text(), re.MULTILINE)
            assert set(imported) <= set(floors[: floor + 1]), file


@pytest.fixture(scope="module")
def other_build(tmp_path_factory):
    """A second CPU build, from sources that differ in a comment."""
    pytest.importorskip("ninja")
    try:
        toolchain.cxx(), toolchain.python_include()
    except toolchain.BuildError as error:  # the tested build was made elsewhere
        pytest.skip(f"cannot build here: {error}")
    copy = checkout.make(tmp_path_factory.mktemp("other"))
    init = copy / "torch-ext" / project.python_name() / "__init__.py"
    init.write_text(init.read_text() + "# another build\n")
    return checkout.build(copy)


def test_two_builds_in_one_process(fused_mlp, other_build):
    """Two builds in one process keep ops, state and modules apart."""
    from kernels import get_local_kernel

    other = get_local_kernel(other_build, backend="cpu")
    assert other is not fused_mlp
    assert other.__name__ != fused_mlp.__name__
    made = reference.operands("gated_mlp")
    expected = reference.eager("gated_mlp", made, "gelu_pytorch_tanh")
    for kernel in (fused_mlp, other, fused_mlp):
        torch.testing.assert_close(kernel.gated_mlp(**made), expected)
    for name in (fused_mlp.__name__, other.__name__):
        assert hasattr(getattr(torch.ops, name), "gated_mlp")
    with other.backend("torch"):
        assert other.explain(other.gated_mlp, **made).reason == "forced by backend()"
        assert fused_mlp.explain(fused_mlp.gated_mlp, **made).reason != "forced by backend()"

    for first in (0, 1):  # index of the report that is restored first
        model = modules.Plain()
        reports = [other.fuse_mlps(model), fused_mlp.fuse_mlps(model)]
        assert [len(report.fused) for report in reports] == [1, 0]  # one build must not replace another's forward
        assert reports[1].left[0].reason == f"its forward is overridden on the instance (from {modules.__name__})"
        reports[first].restore()
        reports[1 - first].restore()
        assert vars(model).keys() == vars(modules.Plain()).keys()


# The functions' tests run again on each instruction set of the CPU, in a process of its own; all other tests run on the
# last of these.
FLAGS = {"scalar": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
FLAGS["avx512_bf16"] = FLAGS["avx512"] | {"avx512_bf16"}
FLAGS["amx"] = FLAGS["avx512_bf16"] | {"amx_tile", "amx_bf16"}


@pytest.mark.parametrize("isa", FLAGS)
def test_instruction_sets(isa):
    known = [name for name, flags in FLAGS.items() if flags <= machine.cpu_flags()]
    if isa not in known[:-1]:
        pytest.skip(f"all tests run on {isa}" if isa in known else f"this CPU has no {isa}")
    chosen = "activations_and_dtypes or extreme or strides_of_all or many_rows or few_rows or any_call"
    chosen = f"({chosen} or number_of_rows) and not -float16"  # float16 is left to torch
    if isa == "avx512_bf16":  # differs from avx512 only in products of this dtype
        chosen += " and bfloat16"
    chosen = f"({chosen}) or random_shapes or every_code_in_products"
    files = ("tests/functions/test_functional.py", "tests/experts/test_experts.py", "tests/training/test_training.py")
    files += ("tests/quantized/test_quantized_kernels.py",)
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    variables = environment(LOCAL_KERNELS=local_kernels(), FUSED_MLP_CPU_ISA=isa, CUDA_VISIBLE_DEVICES="")
    done = forks.run(program, "-q", "-p", "no:cacheprovider", *files, "-k", chosen, env=variables, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^[1-9]\d* passed", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("isa", ["sse2", ""])
def test_an_instruction_set_that_does_not_exist(isa):
    script = "import project, torch; from kernels import get_kernel\n"
    script += (
        "get_kernel(project.repo_id(), version=project.version(), backend='cpu').swiglu(torch.ones(2), torch.ones(2))"
    )
    variables = environment(LOCAL_KERNELS=local_kernels(), FUSED_MLP_CPU_ISA=isa)
    done = forks.run(script, cwd=ROOT / "tools", env=variables)
    assert done.returncode != 0
    assert f"FUSED_MLP_CPU_ISA must be scalar, avx2, avx512, avx512_bf16 or amx, not {isa}" in done.stderr
