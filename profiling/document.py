"""Fills the tables of docs/profiling.md from a results.json, so that they contain only measured figures."""

import argparse
import json
from pathlib import Path

import environment  # noqa: F401
import results

import documents

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "profiling.md"


def fill(text: str, run: dict, source: str) -> str:
    return documents.fill(text, _parts(run, source))


def _parts(run: dict, source: str) -> dict[str, str]:
    command = f"`python profiling/document.py {source}`"
    parts = {"source": f"Machine: {results.machine(run)}, {run['dtype']}. Tables filled by {command}."}
    for name, reason in run["left_out"].items():
        parts[f"mlp-{name}"] = f"(`{name}` is left out of this run: {reason}.)"
    for workload in run["workloads"]:
        key = workload["key"]
        shape = ", ".join(f"{name} {size}" for name, size in workload["shape"].items())
        parts[f"{key}-comparison"] = (
            f"{shape}:\n\n{documents.table(results.COLUMNS, results.comparison(workload), left=1)}"
        )
        for setup in workload["setups"]:
            parts[f"{key}-{setup['key']}"] = _marks(setup)
    return parts


def _marks(setup: dict) -> str:
    rows = [(m["claim"], "yes" if m["held"] else "**no**", m["seen"]) for m in setup["expectations"]]
    return documents.table((f"{setup['title']}: expected", "held", "seen"), rows, left=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of compare.py")
    given = parser.parse_args()
    run = json.loads(given.results.read_text())
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), run, str(given.results)))
    print(DOCUMENT)


if __name__ == "__main__":
    main()
