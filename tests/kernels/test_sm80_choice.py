"""The GEMMs of sm_80 on GPUs that are not here: the choices of the model of their times, and its refusals."""

import json
import re

import pytest

import gemm_kernels
import project
import sanitizer_cases
from tuning.sm80 import predict
from tuning.sm80.prediction import GPUS, Predictor

DOCUMENT = project.ROOT / "cuda/sm80/README.md"
KERNELS = gemm_kernels.entries("sm80")
WIDTHS = [(384, 1536), (768, 3072), (1152, 6912), (2048, 8192), (4096, 14336), (8192, 28672)]
ROWS = [1, 7, 16, 40, 64, 100, 197, 512, 2048, 8192]
gpus = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> Predictor:
    return Predictor(tmp_path_factory.mktemp("prediction"))


@gpus
def test_every_choice_runs_on_its_gpu(predictor, gpu):
    listed = predictor.kernels()
    assert len(listed) == len(KERNELS)
    for m in ROWS:
        for k, n in WIDTHS:
            for gated in (True, False):
                found = predictor.predict(gpu, m, n, k, gated)
                kernel = listed[found.kernel]
                assert kernel.threads <= 1024 and kernel.shared <= gpu.shared_of_cta
                assert (KERNELS[found.kernel][1] == "Gated") == gated
                assert found.ours == (1.1 * found.microseconds <= found.torch_microseconds)
                if m <= 16:
                    assert KERNELS[found.kernel][0] == "streamed", (m, k, n)
                if m >= 512:
                    assert KERNELS[found.kernel][0] == "tiled", (m, k, n)


@gpus
def test_it_steps_aside_where_nothing_is_saved(predictor, gpu):
    """Plain products have no pointwise kernel to save, and tanh-GELU with a bias is cuBLASLt's: both stay torch's."""
    for m in (64, 512, 8192):
        for k, n in WIDTHS[2:]:
            assert not predictor.predict(gpu, m, n, k, False, "linear").ours
            assert not predictor.predict(gpu, m, n, k, False, "gelu_pytorch_tanh", biased=True).ours
    assert not predictor.predict(gpu, 8192, 28672, 8192, True).ours  # arithmetic dominates


def test_large_tiles_only_where_they_fit(predictor):
    def tile(name):
        return KERNELS[predictor.predict(GPUS[name], 16384, 8192, 4096, True).kernel][2:4]

    assert tile("A100 80GB SXM") == ("128", "256")
    assert tile("L40S") == tile("RTX 5090") == tile("Jetson AGX Orin") == ("256", "128")


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_small_tiles_have_the_deepest_ring_that_leaves_room_for_two(predictor, gated):
    def rings(name):
        offered = [KERNELS[i] for i, each in enumerate(predictor.kernels()) if predictor.offered(GPUS[name], i)]
        product = "Gated" if gated else "Plain"
        return [(block_k, stages) for _, *tile, block_k, _, _, stages in offered if tile == [product, "128", "128"]]

    assert rings("H200") == [("64", "3")]
    assert rings("A100 80GB SXM") == rings("Jetson AGX Orin") == [("32", "4")]
    assert rings("L40S") == rings("RTX 5090") == [("32", "3")]


def test_the_prediction_in_the_document(predictor):
    assert predict.table(predictor) in DOCUMENT.read_text(), "put what tools/tuning/sm80/predict.py prints there"


def test_a_hopper_gpu_has_kernels_of_its_own():
    """sm90 precedes sm80 in the list of architectures, of which the first that runs on a GPU is chosen."""
    text = (project.ROOT / "cuda/gemm/choice/choice.cpp").read_text()
    rows = re.findall(r"\{&(\w+)::kArchitecture, (\w+), \w+\}", text)
    assert rows == [("sm90", "true"), ("sm80", "true")]


def test_streamed_kernels_beside_those_of_a_hopper_gpu(predictor):
    """On Hopper GPUs, streamed kernels are chosen up to 32 rows, 64 without a gate, in one or two tiles."""
    h200 = GPUS["H200"]
    for k, n in WIDTHS:
        for gated in (True, False):
            for m, rows in ((1, "8"), (8, "8"), (9, "8 16"), (16, "8 16"), (17, "16 32"), (32, "16 32")):
                kernel, microseconds = predictor.beside_sm90(h200, m, n, k, gated)
                assert KERNELS[kernel][:2] == ("streamed", "Gated" if gated else "Plain")
                assert KERNELS[kernel][2] in rows.split()
                bytes_read = 2 * n * k * (2 if gated else 1)
                assert 0.85 * bytes_read / h200.bytes_per_microsecond < microseconds < 12 + 1.8 * bytes_read / 4e6
            for m in (33, 64):
                kernel, _ = predictor.beside_sm90(h200, m, n, k, gated)
                assert kernel == -1 if gated else KERNELS[kernel][2] in ("32", "64")
            assert predictor.beside_sm90(h200, 65, n, k, gated)[0] == -1


@pytest.mark.parametrize(("k", "gated", "longer"), [(4112, False, 1.25), (4104, False, 1.5), (4112, True, 1.25)])
def test_streamed_kernels_beside_those_of_a_hopper_gpu_read_parts_of_lines(predictor, k, gated, longer):
    h200 = GPUS["H200"]
    kernel, microseconds = predictor.beside_sm90(h200, 8, 4096, k, gated)
    whole, whole_microseconds = predictor.beside_sm90(h200, 8, 4096, 4096, gated)
    assert kernel == whole
    assert microseconds / whole_microseconds == pytest.approx(longer, rel=0.01)
    assert (predictor.beside_sm90(h200, 17, 4096, k, gated)[0] == -1) == gated


@gpus
def test_training_is_chosen_with_the_same_margin(predictor, gpu):
    products = range(2, 2 + len(gemm_kernels.TRAINING))  # as in cuda/gemm/problem.h
    for k, n in WIDTHS:
        for m in ROWS:
            for number in products:
                ours, microseconds, torch_microseconds = predictor.predict_training(gpu, number, m, n, k)
                assert ours == (1.1 * microseconds <= torch_microseconds)


@gpus
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_chosen_with_the_same_margin(predictor, gpu, transposed):
    """Experts follow the same margin. For many experts with few rows ours are estimated to be faster: torch launches a
    product for each.
    """
    for sizes, rows in (
        ((1, 8, 128, 2048, 768), (8, 16)),
        ((16, 8, 128, 2048, 768), (16, 16)),
        ((256, 8, 128, 2048, 768), (32, 128)),
        ((4096, 8, 128, 2048, 768), (128, 128)),
        ((8192, 2, 8, 4096, 14336), (128, 128)),
    ):
        ours, tile, microseconds, torch_microseconds = predictor.predict_experts(gpu, sizes, transposed)
        assert ours == (1.1 * microseconds <= torch_microseconds)
        assert tile == rows[transposed]
        if sizes[0] < 200 and not transposed:
            assert microseconds < torch_microseconds
        ours, tile, microseconds, torch_microseconds = predictor.predict_experts(gpu, sizes, transposed, trained=True)
        assert (ours, tile) == (1.1 * microseconds <= torch_microseconds, 128)


@pytest.mark.parametrize("shape", predict.SHAPES, ids=str)
def test_explain_names_kernel_and_reason_on_every_gpu(predictor, shape):
    """For descriptions of all GPUs, explain's own code names the kernel and the reason."""
    found = predict.explanations(predictor, shape)
    capabilities = {GPUS[name].capability for name in found}
    assert capabilities == {(8, 0), (8, 6), (8, 7), (8, 9), (12, 0)}
    m, dim, hidden = shape
    for name, words in found.items():
        predicted = predictor.predict(GPUS[name], m, hidden, dim, gated=True)
        loop, _, rows, width, *_ = KERNELS[predicted.kernel]
        if predicted.ours:
            tiles = f"tiles of {rows} x {width}" if loop == "tiled" else f"tiles of {rows}"
            assert words.startswith("fused sm80 GEMM: ") and tiles in words
        else:
            assert words.startswith("torch's GEMM and a pointwise kernel: ")
        assert "a performance model of this GPU, not a measurement" in words


def test_the_model_is_no_kinder_to_ours_than_what_was_measured(predictor):
    """The model's ratio of our time to torch's is at least as measured, against torch's kernels that use mma.sync."""
    measured = json.loads((project.ROOT / "benchmarks/results/gemms/h200-mma-sync.json").read_text())["found"]
    compared = [entry for entry in measured if "cublaslt" in entry.get("us", {})]
    assert len(compared) >= 3
    for entry in compared:
        gated = entry["what"].startswith("gated")
        m, k, n = map(int, entry["what"].split()[-3:])
        activation = "linear" if entry["what"].startswith("down") else "silu"
        ours = predictor.predict(GPUS["H200"], m, n, k, gated, activation).microseconds
        theirs = predictor.predict(GPUS["H200"], m, n * (2 if gated else 1), k, False, "linear").torch_microseconds
        assert ours / theirs > 0.97 * entry["us"]["ours"] / entry["us"]["cublaslt"], entry["what"]


def test_sanitizer_cases_have_tails_for_every_kernel():
    """Cases have tails in all dimensions, k of less than a block, and k of more than the ring holds."""
    for entry in KERNELS:
        rows, width, block_k = (int(number) for number in entry[2:5])
        columns = width if entry[0] == "streamed" or entry[1] == "Plain" else width // 2
        shapes = [shape for _, shape in sanitizer_cases.forced_shapes("sm80", entry)]
        assert all(k % 8 == 0 and n % 8 == 0 for _, k, n in shapes)
        for place, size in ((0, rows), (1, block_k), (2, columns)):
            sizes = [shape[place] for shape in shapes]
            assert min(sizes) < size < max(sizes) and any(found % size for found in sizes)
        assert max(k for _, k, _ in shapes) > block_k * int(entry[-1])
