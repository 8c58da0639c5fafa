"""The benchmarks' statements of where fusing pays and where not. No times measured here are meaningful."""

import gc
import json
import re
import sys
import traceback
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import project

sys.path += [str(project.ROOT / "benchmarks" / folder) for folder in ("", "experts", "formats", "mlps", "training")]

import adapters
import break_even
import experts
import peers
import plots
import points
import providers
import quantised
import training

import measure

STORED = project.ROOT / "benchmarks/results/mlps"


@pytest.mark.parametrize(
    ("ratios", "start", "words"),
    [
        ({1: 0.5, 8: 0.9, 64: 0.7}, 1, "fusing pays at every M measured, from 1 to 64"),
        (
            {1: 1.2, 8: 1.0, 64: 0.7},
            64,
            "from M = 64; it makes no difference at M in 8; it does not pay at M in 1",
        ),
        ({1: 0.8, 8: 1.1, 64: 0.7}, 64, "pays from M = 64; it pays at M in 1; it does not pay at M in 8"),
        (
            {64: 1.03, 1: 0.8, 8: 0.7},
            None,
            "there is no M from which on fusing pays; it pays at M in 1, 8; it does not pay at M in 64",
        ),
        ({1: 1.3, 8: 1.1}, None, "there is no M from which on fusing pays; it does not pay at M in 1, 8"),
        ({1: (0.5, 0.16), 8: (0.9, 0.15)}, 8, "fusing pays from M = 8; it is too noisy to tell at M in 1"),
    ],
)
def test_break_even(ratios, start, words):
    given = {m: ratio if isinstance(ratio, tuple) else (ratio,) for m, ratio in ratios.items()}
    ratios = {m: break_even.Ratio(*ratio) for m, ratio in given.items()}
    assert break_even.pays_from(ratios) == start
    assert break_even.sentence(ratios).endswith(words)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(0.5, "pays"), (0.979, "pays"), (0.981, "even"), (1.0, "even"), (1.019, "even"), (1.021, "does not pay")],
)
def test_verdicts(ratio, verdict):
    assert break_even.Ratio(ratio).verdict == break_even.Ratio(ratio, 0.15).verdict == verdict
    assert break_even.Ratio(ratio, 0.151).verdict == "too noisy to tell"


def measured(m, **times):
    return {"shape": [m, 8, 16], "providers": {name: {"wall_us": time} for name, time in times.items()}}


def test_ratios():
    """Ratios are against eager or the fastest peer: parts of the work and our other implementations are no peers."""
    results = [
        measured(1, eager=10.0, compile=8.0, gemms=1.0, ours=4.0, **{"ours-triton": 2.0}),
        measured(2, eager=6.0),
    ]
    results[0]["providers"]["compile"]["wall_us_spread"] = 0.2
    assert break_even.ratios(results, "wall_us", "eager") == {1: (0.4, 0.0)}
    assert break_even.ratios(results, "wall_us", None) == {1: (0.5, 0.2)}


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["peers.py", *map(str, arguments)])
    peers.main()
    return " ".join(capsys.readouterr().out.split())


def test_stored_results_over_m(monkeypatch, capsys, tmp_path):
    """A planted point at which fusing does not pay in the stored sweep is reported and plotted."""
    stored = json.loads((STORED / "h100-sweep.json").read_text())
    (point,) = (result["providers"] for result in stored["results"] if result["shape"] == [64, 1280, 5120])
    point["ours"]["kernel_us"] = 1.03 * point["eager"]["kernel_us"]
    source, out = tmp_path / "sweep.json", tmp_path / "plot"
    source.write_text(json.dumps(stored))
    said = run(monkeypatch, capsys, "--from", source, "--dim", 1280, "--hidden", 5120, "--out", out)
    assert "GPU time, against eager: fusing pays from M = 77" in said
    assert "it does not pay at M in 64." in said
    assert "wall time, against eager: fusing pays at every M measured, from 1 to 16384" in said
    for scheme in ("", "-dark"):
        drawn = (tmp_path / f"plot-kernel{scheme}.svg").read_text()
        # matplotlib writes the text of its glyphs as comments
        assert all(
            f"<!-- {words} -->" in drawn for words in ("time, µs", "speed-up over eager", "rows (tokens)", "ours")
        )
        assert "GPU time of the gated MLP, 1280 x 5120" in drawn
    assert (tmp_path / "plot-wall.svg").exists()
    said = run(monkeypatch, capsys, "--from", source, "--dim", 1024, "--hidden", 4096, "--out", out)
    assert "does not pay" not in said


def test_lines_of_a_plot():
    results = [
        {"shape": [m, 8, 16], "providers": {"eager": {"us": 6.0 * m, "us_spread": 0.2}, "ours": {"us": 4.0 * m}}}
        for m in (1, 2)
    ]
    times, speedups = plots.lines_of(results, "us", ["ours"])
    assert {name: line.values for name, line in times.items()} == {"eager": [6.0, 12.0], "ours": [4.0, 8.0]}
    assert times["eager"].spreads == [0.1, 0.1]  # on each side
    assert list(speedups) == ["ours"] and speedups["ours"].values == [1.5, 1.5]
    assert speedups["ours"].spreads == [0.1, 0.1]


def test_the_plots_of_the_documents(monkeypatch, tmp_path):
    """The documents' plots are those of the stored results."""
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    plots.main()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 10
    for path in drawn:
        assert path.read_text() == (project.ROOT / "docs/images" / path.name).read_text(), "run benchmarks/plots.py"


def test_a_run_that_is_slower_than_eager_fails(monkeypatch, capsys, tmp_path):
    stored = json.loads((STORED / "h100-mlp.json").read_text())
    point = stored["results"][1]["providers"]
    source = tmp_path / "mlp.json"
    for ratio, failure in ((1.019, None), (1.03, "error: ours takes more than 1.02 of eager's time at .*: 1.030")):
        point["ours"]["kernel_us"] = ratio * point["eager"]["kernel_us"]
        source.write_text(json.dumps(stored))
        with pytest.raises(SystemExit) as end:
            run(monkeypatch, capsys, "--from", source, "--limit", 1.02, "--out", tmp_path / "plot")
        assert end.value.code is None if failure is None else re.fullmatch(failure, end.value.code)


@pytest.fixture
def quick_facts(monkeypatch):
    """Measures this machine's bandwidth by copies of a few megabytes."""
    monkeypatch.setattr(measure, "copy_bandwidth", partial(measure.copy_bandwidth, megabytes=8))


def test_a_run_on_this_machine(monkeypatch, capsys, tmp_path, quick_facts):
    """A run on this machine is written, printed and read again, from the table of shapes to every M."""
    monkeypatch.setattr(peers, "SWEEP_M", [4, 8])
    monkeypatch.setattr(peers, "SWEEP_M_CPU", [4, 8])
    few = ("--providers", "eager", "gemms", "ours", "--rounds", 1, "--budget-us", 500, "--dim", 32, "--hidden", 64)
    few += ("--activation", "silu")
    said = run(monkeypatch, capsys, *few, "--out", tmp_path / "run")
    found = json.loads((tmp_path / "run.json").read_text())
    assert [result["shape"] for result in found["results"]] == [[4, 32, 64], [8, 32, 64]]
    for result in found["results"]:
        assert list(result["providers"]) == ["eager", "gemms", "ours"]
        assert all(0 < figures["wall_us"] < 1e6 for figures in result["providers"].values())
    assert "wall time, against eager: " in said
    assert "32 x 64, silu" in said
    assert "gemms: PyTorch's matrix products of the MLP alone" in said
    assert (found["machine"]["dtype"], found["machine"]["activation"]) == ("bfloat16", "silu")
    assert float(found["machine"]["copy_bandwidth_GBps"]) > 0


def results(monkeypatch, benchmark, out, *arguments):
    """Returns the results that a benchmark writes; it prints its table and draws its plots, except those of models and
    of runs without eager."""
    quick = ("--rounds", "1", "--seconds", "0.0005", "--out", str(out))
    monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments, *quick])
    benchmark.main()
    found = json.loads(out.with_suffix(".json").read_text())["results"]
    is_drawn = "--models" not in arguments and any("eager" in result["providers"] for result in found)
    assert out.with_suffix(".svg").exists() == is_drawn
    return found


def test_a_run_of_experts(monkeypatch, tmp_path, quick_facts):
    tiny = experts.Mixture("tiny", experts=4, top_k=2, dim=32, hidden=16, tokens=(3,), trained=(3,))
    monkeypatch.setattr(experts, "MIXTURES", (tiny,))
    found = results(monkeypatch, experts, tmp_path / "run")
    cases = [(result["routing"], result["backward"]) for result in found]
    assert cases == [(routing, backward) for routing in ("balanced", "zipf") for backward in (False, True)]
    for result in found:
        assert {"grouped_mm", "ours"} <= result["providers"].keys()
        assert all(figures["wall_us"] > 0 for figures in result["providers"].values())


def test_a_run_of_adapters(monkeypatch, tmp_path, quick_facts):
    """Each implementation of each case is measured, and those that should keep less memory do."""
    monkeypatch.setattr(adapters, "TRAINED", adapters.TRAINED[:1])
    monkeypatch.setattr(adapters, "STEPS", adapters.STEPS[-1:])
    found = results(monkeypatch, adapters, tmp_path / "run", "--quick", "--copies", "1")
    of_experts = ["experts", "experts in inference"]
    assert [result["part"] for result in found] == ["mlp", "inference", "step", *of_experts]
    assert not any(reason for result in found for reason in result["left"].values())
    for result in found:
        trained = {"ours-recompute"} if result["part"] == "mlp" else set()
        wanted = {"eager", "ours", "ours-base", "gemms"} | trained
        if result["part"] in ("step", *of_experts):
            wanted = {"eager", "ours"} | ({"ours-base"} if result["part"] in of_experts else set())
        assert result["providers"].keys() == wanted
        drawn = (tmp_path / "run.svg").read_text()
        assert all(f"<!-- {words} -->" in drawn for words in plots.case_of(result).split(": "))
    saved = {way: figures["saved"] for way, figures in found[0]["providers"].items() if "saved" in figures}
    assert saved["ours-recompute"] < saved["ours"] < saved["eager"]


def test_a_run_of_quantised(monkeypatch, tmp_path, quick_facts):
    """Each format is measured by every provider, without GPU-only formats on a CPU, and the results agree."""
    found = results(monkeypatch, quantised, tmp_path / "run", "--quick")
    wanted = [form for form in quantised.TOLERANCES if quantised.ON_GPU or form not in quantised.ON_GPUS_ALONE]
    assert [result["format"] for result in found] == [form for form in wanted for _ in range(2)]
    assert not any(result["left"] for result in found)
    assert all(result["providers"].keys() == set(quantised.PROVIDERS) for result in found)


def test_a_provider_that_fails_loses_no_other(monkeypatch, tmp_path, quick_facts):
    """A provider that fails at its first call or in a later turn does not affect the others."""
    monkeypatch.setattr(quantised.GatedMLP, "forward", lambda self, x: 1 / 0)
    (found,) = results(monkeypatch, quantised, tmp_path / "run", "--quick", "--formats", "nf4", "--rows", "1")
    assert found["left"] == {"eager": "ZeroDivisionError: division by zero"}
    assert found["providers"].keys() == {"ours", "ours-bf16"}
    left: dict[str, str] = {}
    turns = points.compared(
        {"a": lambda: 1, "b": lambda: 1 / 0}, lambda calls: {n: c() for n, c in calls.items()}, left
    )
    assert turns == {"a": 1} and left.keys() == {"b"}


def test_a_run_of_quantised_models(monkeypatch, tmp_path, quick_facts):
    """Quantised models are measured, and their logits and losses agree."""
    found = results(monkeypatch, quantised, tmp_path / "run", "--quick", "--models", "--formats", "nf4")
    assert [result["shape"][:2] for result in found] == [["decoding", 1], ["decoding", 16], ["qlora", 4]]
    assert not any(result["left"] for result in found)
    ways = set(quantised.PROVIDERS)
    assert [set(result["providers"]) for result in found] == [ways, ways, ways - {"ours-bf16"}]


@pytest.mark.parametrize("activation", providers.ACTIVATIONS)
def test_all_ways_compute_the_same_mlp(fused_mlp, device, activation):
    names = [name for name in providers.WORKLOADS["mlp"][1] if name not in (*providers.PARTS, "compile-max")]
    names = [name for name in names if providers.unavailable(name, activation) is None]
    with torch.no_grad():
        made = providers.mlp_providers((8, 64, 96), torch.float32, fused_mlp, names, activation)
        expected = made.pop("eager")()
        assert made
        for name, run in made.items():
            torch.testing.assert_close(run(), expected, rtol=1e-2, atol=1e-2, msg=name)


def test_turns_are_taken_in_turns_and_medians_count():
    order = []

    def turns(name, *figures):
        figures = iter(figures)
        return lambda: order.append(name) or {"us": next(figures)}

    figures = measure.in_turns({"a": turns("a", 5.0, 1.0, 2.0), "b": turns("b", 50.0, 40.0, 99.0)}, rounds=3)
    assert order == ["a", "b"] * 3
    assert figures == {"a": {"us": 2.0, "us_spread": 2.0}, "b": {"us": 50.0, "us_spread": 59 / 50}}


def test_times_are_of_one_call(monkeypatch):
    """Times are per call, for any number of calls in a turn, by a clock that only the calls advance."""
    now = 0.0

    def call(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(measure.timing, "time", SimpleNamespace(perf_counter=lambda: now))
    figures = measure.compare({ms: partial(call, ms / 1e3) for ms in (1, 8)}, rounds=3, budget_us=16_000)
    for ms in (1, 8):
        assert figures[ms]["wall_us"] == pytest.approx(ms * 1e3)


def test_ratios_are_of_neighbours(monkeypatch):
    """On a host that slows down with every call, a ratio of medians would depend on how late a variant ran."""
    now, slowness = 0.0, 1.0

    def call(seconds):
        nonlocal now, slowness
        now += seconds * slowness
        slowness *= 1.0001

    monkeypatch.setattr(measure.timing, "time", SimpleNamespace(perf_counter=lambda: now))
    made = {"original": [partial(call, 2e-3)] * 3, "half": [partial(call, 1e-3)] * 2}
    figures = measure.copies_in_turns(made, rounds=5, budget_us=16_000)
    assert {name: len(copies) for name, copies in figures.items()} == {"original": 3, "half": 2}
    assert all(copy["ratio"] == 1.0 and copy["ms"] >= 2.0 for copy in figures["original"])
    assert all(copy["ratio"] == pytest.approx(0.5, rel=0.01) and copy["ms"] >= 1.0 for copy in figures["half"])


def test_turns_begin_anywhere_in_a_chunk_of_the_stack():
    """The calls of a turn have one stack depth, and the turns together cover most depths in a chunk of the stack."""
    turns = []
    for _ in range(600):
        depths = []
        measure.wall_microseconds(lambda depths=depths: depths.append(len(list(traceback.walk_stack(None)))), 3)
        turns.append(depths)
    assert all(len(depths) == 3 and len(set(depths)) == 1 for depths in turns)
    found = {depths[0] for depths in turns}
    assert len(found) > 120 and max(found) - min(found) < 150


def test_garbage_of_earlier_calls_is_no_memory_of_this_one(device):
    garbage = [torch.empty(1 << 20, device=device)]
    garbage.append(garbage)
    del garbage

    def forward():
        if gc.isenabled():
            gc.collect()  # as Python may at any time
        return torch.ones(2048, device=device)

    assert measure.saved_and_peak(forward, lambda result: None) == (0, 2048 * 4)


def test_training(monkeypatch, tmp_path, capsys):
    """A small run measures every provider or gives a reason why not, and can be printed."""
    named = ["--shapes", "8,16,32", "--models", "--rounds", "2", "--seconds", "0.001"]
    named += ["--providers", "eager", "ours", "ours-recompute", "gemms", "checkpoint", "liger-gemm", "quack"]
    monkeypatch.setattr(measure, "machine", lambda: {"cpu": "this one"})
    monkeypatch.setattr(sys, "argv", ["training.py", *named, "--out", str(tmp_path / "run")])
    training.main()
    (result,) = json.loads((tmp_path / "run.json").read_text())["results"]
    assert {"eager", "ours", "ours-recompute", "gemms", "checkpoint"} <= set(result["providers"])
    assert {*result["providers"], *result["left"]} == set(named[named.index("--providers") + 1 :])
    assert result["providers"]["ours-recompute"]["saved"] < result["providers"]["ours"]["saved"]
    assert result["providers"]["ours"]["saved"] < result["providers"]["eager"]["saved"]
    assert "8, 16, 32 bfloat16" in capsys.readouterr().out
