"""The profiling scripts: their expectations hold on this machine, and each expectation can fail."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import machine
import project
from traces import Planted, eager_mlp

sys.path.append(str(project.ROOT / "profiling"))

import environment  # noqa: F401
import expectations as expect
import plan
import recorder
import session
import setups
import timeline

PROFILING = project.ROOT / "profiling"
needs_gpu = pytest.mark.skipif(machine.device_type() != "cuda", reason="needs a GPU and a torch with CUDA")


def recording(forwards, answer=1.0, compilations=0):
    return recorder.Recording("cuda", forwards, torch.tensor([answer]), compilations)


def look(expectation, forwards, eager=None, **facts):
    held, seen = expectation.look(recording(forwards, **facts), recording(eager or forwards))
    assert seen
    return held


def test_a_trace_of_a_gpu():
    forwards = eager_mlp().read()
    assert len(forwards) == 3
    for forward in forwards:
        assert [launch.kind for launch in forward.launches] == ["gemm", "pointwise"] * 2 + ["gemm", "aux"]
        assert forward.cpu_before_launch_us == pytest.approx(4.0)
        assert forward.latency_us == pytest.approx(131.0)
        assert forward.busy_us == pytest.approx(5 * 18.0 + 1.0)
        assert [op.launches for op in forward.ops if op.name == "aten::linear"] == [1, 1, 1]
        assert [op.launches for op in forward.ops if op.name == "aten::t"] == [0, 0, 0]


def test_a_trace_of_a_cpu():
    """Enclosing ranges and views are skipped; operations that an op calls internally belong to it."""
    planted = Planted().forward(duration=90.0)
    planted.op("TorchDynamo Cache Lookup", 0.0, 5.0).op("aten::linear", 10.0, 30.0).op("aten::t", 11.0, 1.0)
    planted.op("aten::addmm", 13.0, 20.0).op("aten::copy_", 14.0, 3.0).op("aten::gelu", 50.0, 10.0)
    planted.op("graph_0_cpp_fused_mul_0", 70.0, 8.0)
    (forward,) = planted.read()
    assert [launch.name for launch in forward.launches] == ["aten::addmm", "aten::gelu", "graph_0_cpp_fused_mul_0"]
    assert [launch.kind for launch in forward.launches] == ["gemm", "pointwise", "pointwise"]
    assert forward.cpu_before_launch_us == pytest.approx(13.0)
    assert forward.busy_us == pytest.approx(38.0)
    assert forward.latency_us == pytest.approx(90.0)


def test_kernels_that_overlap_count_once():
    (forward,) = Planted().forward().kernel("a", 10.0, 20.0).kernel("b", 25.0, 10.0).read()
    assert forward.busy_us == pytest.approx(25.0)


@pytest.mark.parametrize(("device_type", "peak"), [(0, 300), (1, 50)])
def test_peak_memory(device_type, peak):
    planted = Planted().forward().memory(1, 200).memory(2, 100).memory(3, -200).memory(4, 150).memory(5, 50, 1)
    if device_type == 1:
        planted.kernel("k", 10.0, 1.0)
    (forward,) = planted.read()
    assert forward.peak_bytes == peak


def test_the_middle_forward():
    planted = Planted()
    for duration in (90.0, 10.0, 30.0):
        planted.forward(duration)
    assert timeline.middle(planted.read()).latency_us == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)", "aux"),
        ("Memset (Device)", "aux"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>(int)", "pointwise"),
        ("triton_poi_fused_gelu_mul_0", "pointwise"),
        ("_geglu_tanh_forward_kernel", "pointwise"),
        ("void fused_mlp::pointwise_kernel<c10::BFloat16, 8>(Operands)", "pointwise"),
        ("void fused_mlp::sm90::tiled_gemm_kernel<TiledGemm<__nv_bfloat16>>(TiledGemmArgs)", "fused"),
        ("matmul_kernel", "fused"),
        ("_fused_mlp_cpu_45bc579528::gated_mlp", "fused"),
        ("_fused_mlp_cpu_45bc579528::act_and_mul", "pointwise"),
        ("aten::addmm", "gemm"),
        ("aten::mul", "pointwise"),
        ("graph_0_cpp_fused__unsafe_view_gelu_mul_0", "pointwise"),
    ],
)
def test_kinds_of_names(name, kind):
    assert timeline.kind_of(name) == kind


# Each expectation holds on a matching trace, and fails on a faulty one.


def compiled(*more: str) -> Planted:
    """Returns a trace of three forwards of a compiled MLP, with additional kernels."""
    planted = Planted()
    for _ in range(3):
        planted.forward()
        for i, name in enumerate(("nvjet_gate", "nvjet_up", "triton_poi_fused_gelu_mul_0", "nvjet_down")):
            planted.kernel(name, 20.0 * i + 30.0, 18.0)
    for name in more:
        planted.kernel(name, 200.0, 1.0)
    return planted


def ops(*named) -> Planted:
    planted = Planted().forward()
    for name, start, duration in named:
        planted.op(name, start, duration)
    return planted


ADDMM = ("aten::addmm", 1.0, 20.0)
OURS = (("_fused_mlp_cpu_1::gated_mlp", 1.0, 50.0), ("aten::view", 2.0, 1.0))
# An expectation, a trace on which it holds, and faulty traces.
CAN_FAIL = {
    "launches": (
        expect.launches(plan.EAGER, "GPU kernel"),
        eager_mlp(),
        [compiled(), eager_mlp().kernel("copy_kernel", 200.0, 1.0)],
    ),
    "their order": (
        expect.launches((plan.EAGER[1], plan.EAGER[0], *plan.EAGER[2:]), "GPU kernel"),
        None,
        [eager_mlp()],
    ),
    "launches_nothing": (
        expect.launches_nothing("aten::t"),
        eager_mlp(),
        # Around the first launch call, and without any such op.
        [eager_mlp().op("aten::t", 2.0, 5.0), Planted().forward().kernel("gemm", 5.0, 1.0)],
    ),
    "without": (expect.without("aten::add"), eager_mlp(), [ops(("aten::add", 1.0, 2.0))]),
    "beneath": (
        expect.beneath("aten::addmm", "aten::copy_", "why"),
        ops(ADDMM, ("aten::copy_", 2.0, 3.0)),
        [ops(ADDMM, ("aten::copy_", 30.0, 3.0))],
    ),
    "nothing_computes_beneath": (
        expect.nothing_computes_beneath("_fused_mlp"),
        ops(*OURS, ("aten::mm", 60.0, 5.0)),
        [ops(*OURS, ("aten::mm", 10.0, 5.0))],
    ),
    "same_gemms": (expect.same_gemms(), compiled(), [compiled("nvjet_other")]),
    "same_launches": (expect.same_launches(), eager_mlp(forwards=2), [compiled()]),
}


@pytest.mark.parametrize("name", CAN_FAIL)
def test_an_expectation_can_fail(name):
    expectation, right, faulty = CAN_FAIL[name]
    eager = eager_mlp().read()
    assert right is None or look(expectation, right.read(), eager)
    assert not any(look(expectation, each.read(), eager) for each in faulty)


def test_launches_fails_on_an_empty_trace():
    assert not expect.launches((), "GPU kernel").look(recording(()), recording(()))[0]


@pytest.mark.parametrize("range_", ["TorchDynamo Cache Lookup", "Torch-Compiled Region: 0/0"])
def test_dynamo_can_fail(range_):
    for traced, is_compiled in ((eager_mlp().op(range_, 0.0, 3.0), True), (eager_mlp(), False)):
        for wanted in (True, False):
            assert look(expect.dynamo(wanted), traced.read()) == (wanted == is_compiled)


def test_numbers_can_fail():
    for wanted in (0, 1):
        for found in (0, 1, 2):
            held = look(expect.compilations_on_new_shape(wanted), eager_mlp().read(), compilations=found)
            assert held == (wanted == found)
    for answer, held in ((1.005, True), (1.02, False), (math.nan, False)):
        assert look(expect.agrees(1e-2), eager_mlp().read(), answer=answer) == held


# Bytes, operations and the roofline.


def test_bytes_of_the_steps():
    """Eager moves 10 M H bytes for its two pointwise steps, and writes the hidden rows once more than a gated GEMM."""
    m, d, h = 96, 32, 80
    size = plan.mlp_size(m, d, h, 2)
    gated = 2 * (m * d + 2 * h * d + m * h) + 2 * (m * h + d * h + m * d)
    assert size.bytes_moved(plan.GATED_GEMM) == gated
    assert size.bytes_moved(plan.EAGER) == gated + 10 * m * h + 2 * m * h + 2 * m * d
    assert size.bytes_moved(plan.POINTWISE_FUSED) == size.bytes_moved(plan.EAGER) - 4 * m * h
    assert size.bytes_moved(plan.ONE_OP) == gated - 4 * m * h


@pytest.mark.parametrize(("shape", "microseconds"), [((8192, 768, 3072), 145), ((1, 4096, 14336), 117)])
def test_floors(shape, microseconds):
    """Floors are those of cuda/README.md, at 800 TFLOP/s and 3.0 TB/s."""
    assert plan.mlp_size(*shape, 2).floor_seconds(800e12, 3.0e12) * 1e6 == pytest.approx(microseconds, abs=1)


@pytest.mark.parametrize(
    ("backend", "fused", "steps"),
    [
        ("cuda", (True, False), plan.GATED_GEMM),
        ("cuda", (True, True), plan.GATED_GEMM_AND_OURS),
        ("cuda", (False, False), plan.POINTWISE_FUSED),
        ("triton", (), plan.GATED_GEMM),
        ("cpu", (False, False), plan.ONE_OP),
        ("torch", (), plan.EAGER),
    ],
)
def test_steps_follow_what_explain_says(backend, fused, steps):
    parts = tuple(SimpleNamespace(fused=each) for each in fused)
    assert plan.of_ours(SimpleNamespace(implementation=backend, parts=parts)) == steps


# On any machine.


def marks(workload, out):
    """Returns all set-ups' figures, and for every claim whether it held and what was seen."""
    found = session.run(workload, out)
    return found, {(s["key"], m["claim"]): (m["held"], m["seen"]) for s in found for m in s["expectations"]}


def test_one_linear_layer(tmp_path, capsys):
    found, seen = marks(setups.linear(64, 32, 48, compiled=True), tmp_path)
    assert {key for key, _ in seen} == {"eager", "compile"}
    assert all(held for held, _ in seen.values()), {claim: s for claim, s in seen.items() if not s[0]}
    words = capsys.readouterr().out
    assert words.index("I expect:") < words.index("held")
    assert len(json.loads((tmp_path / "linear-eager.json").read_text())["traceEvents"]) > 10
    assert all(len(setup["launches"]) >= 1 for setup in found)


def test_the_mlp(tmp_path):
    chosen = tuple(name for name in setups.IMPLEMENTATIONS if setups.unavailable(name) is None)
    workload = setups.mlp(2, 16, 64, 128, chosen)
    found, seen = marks(workload, tmp_path)
    assert [setup["key"] for setup in found] == ["eager", *chosen]
    assert all(held for held, _ in seen.values()), {claim: s for claim, s in seen.items() if not s[0]}


def test_set_ups_take_turns():
    """A machine that slows down slows all set-ups alike, and the spread shows how reliable their times are."""
    called = []
    workload = setups.linear(4, 8, 8, compiled=False)
    (eager,) = workload.setups

    def named(key):
        return dataclasses.replace(eager, key=key, call=lambda x: called.append(key) or eager.call(x))

    times = session.wall_times(dataclasses.replace(workload, setups=(named("a"), named("b"))))
    assert [set(each) for each in times] == [{"wall_us", "wall_us_spread"}] * 2
    assert all(each["wall_us"] > 0 and each["wall_us_spread"] > 0 for each in times)
    switches = sum(one != other for one, other in itertools.pairwise(called))
    assert switches >= 2 * session.ROUNDS - 1


def test_an_expectation_that_fails_is_told(tmp_path, capsys):
    workload = setups.linear(8, 16, 16, compiled=False)
    wrong = expect.launches(plan.EAGER, "launch")
    eager = workload.setups[0]
    workload = setups.Workload(
        **{**vars(workload), "setups": (setups.Setup(**{**vars(eager), "expectations": (wrong,)}),)}
    )
    _, seen = marks(workload, tmp_path)
    assert [held for held, _ in seen.values()] == [False]
    assert "NOT HELD" in capsys.readouterr().out


TUTORIAL = (64, 128, 768, 3072)


@needs_gpu
@pytest.mark.parametrize("provider", ["compile", "liger", "ours", "ours-compile", "ours-triton"])
def test_the_tutorials_mlp_on_a_gpu(provider, tmp_path):
    """Eager launches five kernels, the compiler and Liger four, ours two, without cuBLAS's copies and fills."""
    if reason := setups.unavailable(provider):
        pytest.skip(reason)
    found, seen = marks(setups.mlp(*TUTORIAL, (provider,)), tmp_path)
    kernels = [sum(launch["kind"] != "aux" for launch in setup["launches"]) for setup in found]
    assert kernels == [5, 4 if provider in ("compile", "liger") else 2]
    assert all(held for held, _ in seen.values()), {claim: s for claim, s in seen.items() if not s[0]}


@needs_gpu
def test_the_tutorials_linear_layer_on_a_gpu(tmp_path):
    found, seen = marks(setups.linear(1024, 32, 64, compiled=True), tmp_path)
    assert [len(setup["launches"]) for setup in found] == [1, 1]
    assert all(held for held, _ in seen.values()), {claim: s for claim, s in seen.items() if not s[0]}


# The commands.


def test_a_script_as_a_user_runs_it(tmp_path):
    shape = ("--batch", 2, "--seq", 8, "--dim", 32, "--hidden", 64)
    command = [sys.executable, PROFILING / "03_kernels_mlp.py", *map(str, shape), "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NOT HELD" not in done.stdout
    assert done.stdout.count("held") >= 8
    assert {path.name for path in tmp_path.iterdir()} == {"mlp-eager.json", "mlp-ours.json"}
