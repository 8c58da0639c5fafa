"""The reports of fuse_mlps and explain on a model: how much is fused, what is not, and why."""

import copy

import pytest
import transformers
from torch import nn

from modules import Gated, Plain
from safety import assert_close, x_of

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def hooked(part):
    part.register_forward_hook(lambda *_: None)
    return part


def test_a_model_is_explained_by_its_parts(fused_mlp, device):
    model = bert().to(device).eval()
    assert fused_mlp.explain(model).implementation == "original"
    report = fused_mlp.fuse_mlps(model)
    explanation = fused_mlp.explain(model)
    assert explanation.operation == "BertModel"
    assert explanation.implementation == "fused"
    sentence = "3 of 3 MLPs run in one call each, norm and residual included; 3 x linear with residual and norm"
    assert explanation.reason == sentence
    assert list(explanation.parts) == report.modules
    assert fused_mlp.explain(model.encoder).implementation == "fused"
    assert fused_mlp.explain(model.encoder).reason == sentence
    report.restore()
    explanation = fused_mlp.explain(model)
    assert explanation.implementation == "original"
    assert "BertLayer (3): not fused" in explanation.reason


def test_a_model_whose_part_changes_is_explained_as_it_is(fused_mlp, device):
    model = nn.Sequential(Gated(), Plain()).to(device)
    fused_mlp.fuse_mlps(model)
    assert fused_mlp.explain(model).implementation == "fused"
    hooked(model[0].down_proj)
    explanation = fused_mlp.explain(model)
    assert explanation.implementation == "partly fused"
    assert explanation.reason == "1 of 2 MLPs run in one call each; Gated: calls down_proj (hooks)"


def test_kernelized_parts_are_explained(fused_mlp, device):
    model = nn.Sequential(Gated(), nn.LayerNorm(32)).to(device)
    model[0].forward = fused_mlp.layers.GatedMLP.forward.__get__(model[0])
    assert fused_mlp.explain(model).implementation == "fused"
    assert fused_mlp.explain(model).reason == "1 of 1 MLP runs in one call"


def test_an_mlp_of_coordinates_is_left(fused_mlp):
    """An MLP of coordinates, as for Swin's relative positions, is left: no kernel takes so few inputs."""
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 8))
    report = fused_mlp.fuse_mlps(model)
    assert not fused_mlp.is_fused(model)
    assert [(entry.pattern, entry.reason) for entry in report.left] == [("plain", "no kernel for 2 input features")]
    assert fused_mlp.fuse_mlps(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))).fused


def test_a_model_without_mlps_is_explained(fused_mlp):
    explanation = fused_mlp.explain(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    assert (explanation.implementation, explanation.reason) == ("original", "no MLP found")


@pytest.mark.parametrize(
    ("alter", "detail"),
    [(hooked, "hooks"), (lambda act: setattr(act, "forward", act.forward.__func__) or act, "an overridden forward")],
    ids=["hook", "forward"],
)
def test_an_altered_activation_is_not_called_unknown(fused_mlp, device, alter, detail):
    module = Gated(lambda: alter(nn.SiLU())).to(device)
    (left,) = fused_mlp.fuse_mlps(module).left
    assert left.reason == f"activation SiLU has {detail}"


class AnMLPWhoseClassHasALongNameIndeedLongerThanMost(Gated):
    pass


def nested(module, depth):
    return nested(nn.ModuleDict({"a_part_with_a_long_name": module}), depth - 1) if depth else module


def test_the_table_fits_a_terminal(fused_mlp, device):
    """The table fits a terminal and keeps names and paths whole, however long they are."""
    module = AnMLPWhoseClassHasALongNameIndeedLongerThanMost().to(device)
    hooked(module.down_proj)
    report = fused_mlp.fuse_mlps(nested(module, 5))
    head, columns, *lines = str(report).splitlines()
    assert head == "0 of 1 MLP runs in one call"
    assert max(map(len, lines)) <= 100
    starts = [columns.index(name) for name in ("class", "pattern", "fused", "why not", "modules")]
    cells = [
        [line[start:end].strip() for line in lines] for start, end in zip(starts, [*starts[1:], None], strict=True)
    ]
    (entry,) = report.modules
    assert ["".join(cell) for cell in cells[:3]] == [entry.class_name, "gated", "partly"]
    assert " ".join(filter(None, cells[3])) == "calls down_proj (hooks)"
    assert "".join(cells[4]) == entry.path


def test_alike_modules_share_a_line(fused_mlp, device):
    model = nn.ModuleDict({"a": nn.ModuleList([Gated(), Gated()]), "b": Gated(), "c": Plain()}).to(device)
    lines = str(fused_mlp.fuse_mlps(model)).splitlines()
    assert [line.split()[-4:] for line in lines[2:]] == [["3:", "a.0", "...", "b"], ["Plain", "plain", "yes", "c"]]
    model = nn.ModuleList([Gated(), Gated()]).to(device)
    assert str(fused_mlp.fuse_mlps(model)).splitlines()[2].endswith("2: *")


def test_the_model_itself_is_named(fused_mlp, device):
    report = fused_mlp.fuse_mlps(Gated().to(device))
    assert report.modules[0].path == ""
    assert str(report).splitlines()[2].endswith("  the model itself")


class Sparse(Gated):
    """Has a condition between the gate and its activation, as Gemma 3n's MLP does."""

    sparsity = 0.5

    def forward(self, x):
        gate = self.gate_proj(x)
        if self.sparsity > 0:
            gate = gate * (gate > self.sparsity)
        activated = self.act_fn(gate)
        up = self.up_proj(x)
        return self.down_proj(activated * up)


def test_a_branch_that_does_not_run_is_not_reported_as_fused(fused_mlp, device):
    module = Sparse().to(device).eval()
    plain = copy.deepcopy(module)
    (entry,) = fused_mlp.fuse_mlps(module).modules
    assert (entry.pattern, entry.extent, entry.fused) == ("gated", "none", False)
    assert entry.reason == "takes another branch of its code (self.sparsity > 0)"
    x = x_of(device)
    for sparsity, extent in ((0.5, "none"), (0, "full"), (0.5, "none"), ("none", "full")):  # the last is unknown
        module.sparsity = plain.sparsity = sparsity
        (entry,) = fused_mlp.fuse_mlps(module).modules
        assert entry.extent == extent
        if sparsity != "none":
            assert_close(module(x), plain(x))
