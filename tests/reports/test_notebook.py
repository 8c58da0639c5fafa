"""fuse_mlps in a notebook: classes defined in cells, in an IPython kernel."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

import machine
import project

HEAD = """
from kernels import get_kernel
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import *

fused_mlp = get_kernel({repo!r}, version={version}, backend={backend!r})

def fused(kind):
    module = kind().eval()
    x = torch.randn(3, 8)
    expected = module(x)
    report = fused_mlp.fuse_mlps(module)
    torch.testing.assert_close(module(x), expected)
    return [entry.pattern for entry in report.fused]
"""

INIT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = nn.SiLU()
"""

CELLS = {
    "module": f"{INIT}\n    def forward(self, x):\n        return self.fc2(self.act(self.fc1(x)))",
    "function": f"{INIT}\n    def forward(self, x):\n        return self.fc2(F.silu(self.fc1(x)))",
    "star import": f"{INIT}\n    def forward(self, x):\n        return self.fc2(silu(self.fc1(x)))",
    "import in the cell": f"import torch.nn.functional as G\n{INIT}\n    def forward(self, x):\n"
    "        return self.fc2(G.silu(self.fc1(x)))",
    "condition": f"if True:{INIT}\n    def forward(self, x):\n        return self.fc2(F.silu(self.fc1(x)))".replace(
        "\n", "\n    "
    ),
    "no_grad": f"{INIT}\n    def forward(self, x):\n        with torch.no_grad():\n"
    "            return self.fc2(F.silu(self.fc1(x)))",
    "magic": f"%pwd\n!true\n{INIT}\n    def forward(self, x):\n        return self.fc2(F.silu(self.fc1(x)))",
    "await": f"import asyncio\nawait asyncio.sleep(0)\n{INIT}\n    def forward(self, x):\n"
    "        return self.fc2(F.silu(self.fc1(x)))",
    "future": f"from __future__ import annotations\n{INIT}\n    def forward(self, x: Tensor) -> Tensor:\n"
    "        return self.fc2(F.silu(self.fc1(x)))",
}


@pytest.fixture(scope="module")
def results():
    """Returns the executed cells, all run in one kernel in order."""
    head = HEAD.format(repo=project.repo_id(), version=project.version(), backend=machine.device_type())
    sources = [head, *(f"{cell}\n\nprint(fused(Model))" for cell in CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute(env=dict(os.environ))
    return dict(zip(("head", *CELLS), notebook.cells, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_a_class_of_a_cell(results, cell):
    outputs = [output.get("text") or output.get("traceback") for output in results[cell].outputs]
    text = "".join(map(str, outputs))  # output may come in any number of parts
    assert text.endswith("['plain']\n"), text
