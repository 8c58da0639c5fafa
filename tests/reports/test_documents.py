"""The documents' figures match stored measurements and counts, and their links and names exist."""

import json
import re
from pathlib import Path

import pytest

import documents
import fill_documents
import project

README = project.ROOT / "README.md"


BESIDE_THE_CODE = [
    project.ROOT / place for place in ("cuda", "cuda/sm90", "cuda/sm80", "cpu", "torch-ext/fused_mlp/models")
]


def markdown_files() -> list[Path]:
    beside = [folder / "README.md" for folder in BESIDE_THE_CODE]
    return [*project.ROOT.glob("*.md"), *(project.ROOT / "docs").glob("*.md"), *beside]


# Filled tables


@pytest.mark.parametrize("path", fill_documents.DOCUMENTS, ids=lambda path: path.name)
def test_filled_from_what_is_stored(path):
    text = path.read_text()
    assert documents.fill(text, fill_documents.parts()) == text, "run `python tools/fill_documents.py`"


def test_another_measurement_shows(monkeypatch, tmp_path):
    """Every part but the floors comes from stored results."""
    before = fill_documents.parts()
    for path in [*fill_documents.RESULTS.rglob("*.json"), fill_documents.CPU_PROFILE]:
        stored = json.loads(path.read_text(), parse_float=lambda number: float(number) ** 1.1)
        stored["machine"]["copy_bandwidth_GBps"] = "1"
        (tmp_path / path.name).write_text(json.dumps(stored))
    coverage = fill_documents.COVERAGE.read_text()
    (tmp_path / "coverage.md").write_text(re.sub(r"\b[1-9]\d\b", "77", coverage))
    monkeypatch.setattr(fill_documents, "RESULTS", tmp_path)
    monkeypatch.setattr(fill_documents, "CPU_PROFILE", tmp_path / "cpu.json")
    monkeypatch.setattr(fill_documents, "COVERAGE", tmp_path / "coverage.md")
    after = fill_documents.parts()
    assert [name for name in before if after[name] == before[name]] == ["floors"]


def test_shares_of_the_mlps(monkeypatch, tmp_path):
    """MLPs with only a fused pointwise part do not count as fused, and experts count separately."""
    monkeypatch.setattr(fill_documents, "COVERAGE", tmp_path / "coverage.md")
    fill_documents.COVERAGE.write_text(
        "Made by `make coverage`: a tiny model of every type in transformers\n1.2.3 (9 of 10), fused.\n"
        "| all of these | 9 | 100 | 80 | 15 | 5 | 95.0% |\n| MoE experts |  | 50 | 35 | 10 | 5 | 90.0% |\n"
    )
    words = fill_documents.coverage_sentence()
    assert "100 MLPs in the 9 model types of transformers 1.2.3" in words
    assert "80.0% are fused" in words and "and 95.0% with" in words
    assert "of 50, 70.0% are fused" in words and "10 in the product" in words


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="no part is called 'nothing'; there are something"):
        documents.fill("<!-- filled: nothing -->\n<!-- end -->", {"something": ""})


def test_a_table():
    rows = [("a|b", "1"), ("c", "2")]
    assert documents.table(("x", "y"), rows, left=1) == "| x | y |\n| --- | ---: |\n| a\\|b | 1 |\n| c | 2 |"


# Links; test_examples.py runs the code


def test_links_lead_somewhere():
    for path in markdown_files():
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
            place, _, heading = target.partition("#")
            found = path if not place else path.parent / place
            assert found.exists(), f"{path.name}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-") for words in headings}, (
                    target
                )


def test_files_that_are_named_exist():
    """Paths in backticks, relative to the root, exist unless they are generated."""
    folders = {path.name for path in project.ROOT.iterdir() if path.is_dir()} - {"build", ".venv"}
    for path in markdown_files():
        for named in re.findall(r"`(?:python )?([\w.-]+/[\w./*-]*)`", path.read_text()):
            if named.split("/")[0] in folders:
                assert list(project.ROOT.glob(named.rstrip("/"))), f"{path.name}: {named}"


@pytest.mark.parametrize("folder", BESIDE_THE_CODE, ids=lambda folder: folder.name)
def test_files_that_are_named_beside_the_code_exist(folder):
    for named in re.findall(r"`([\w/]+\.(?:py|h|cpp|inl|cu|cuh|def))`", (folder / "README.md").read_text()):
        places = (folder, project.ROOT, project.ROOT / "torch-ext/fused_mlp")
        assert any((place / named).exists() for place in places), named


def test_commands_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (project.ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in markdown_files():
        shown = re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        inline = re.findall(r"`(make [^`]*)`", path.read_text())
        for target in re.findall(r"^make ([a-z-]+)", "\n".join([*shown, *inline]), re.MULTILINE):
            assert target in targets, f"{path.name}: make {target}"


def test_messages_that_are_explained_are_given():
    """Messages in the first columns of docs/troubleshooting.md, except other libraries', occur in the sources."""
    places = ("torch-ext", "cpu", "cuda", "examples")
    files = [
        path for place in places for path in (project.ROOT / place).rglob("*") if path.suffix in (".py", ".h", ".cpp")
    ]
    given = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))  # literals on several lines
    table = [
        row for row in (project.ROOT / "docs/troubleshooting.md").read_text().splitlines() if row.startswith("| `")
    ]
    explained = [
        words for row in table if "(from kernels)" not in row for words in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(explained) > 20
    for message in explained:
        for words in filter(None, map(str.strip, message.split("..."))):
            assert words.strip("(), ") in given, message
