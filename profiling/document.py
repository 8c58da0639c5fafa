"""Fills the tables of docs/profiling.md from a results.json, so that they say what was measured and nothing else.

A part between `<!-- filled: NAME -->` and `<!-- end -->` is replaced; the rest of the page is left as it is.
"""

import argparse
import json
import re
from pathlib import Path

import results

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "profiling.md"
_PART = re.compile(r"(<!-- filled: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, run: dict, source: str) -> str:
    parts = _parts(run, source)

    def replace(match: re.Match) -> str:
        if match[2] not in parts:
            raise ValueError(f"no part is called {match[2]!r}; there are {', '.join(parts)}")
        return f"{match[1]}{parts[match[2]]}\n{match[3]}"

    return _PART.sub(replace, text)


def _parts(run: dict, source: str) -> dict[str, str]:
    command = f"`python profiling/document.py {source}`"
    parts = {"source": f"Machine: {results.machine(run)}, {run['dtype']}. Tables filled by {command}."}
    for name, reason in run["left_out"].items():
        parts[f"mlp-{name}"] = f"(`{name}` is left out of this run: {reason}.)"
    for workload in run["workloads"]:
        key = workload["key"]
        shape = ", ".join(f"{name} {size}" for name, size in workload["shape"].items())
        parts[f"{key}-comparison"] = f"{shape}:\n\n{_table(results.COLUMNS, results.comparison(workload), left=1)}"
        for setup in workload["setups"]:
            parts[f"{key}-{setup['key']}"] = _marks(setup)
    return parts


def _marks(setup: dict) -> str:
    rows = [(m["claim"], "yes" if m["held"] else "**no**", m["seen"]) for m in setup["expectations"]]
    return _table((f"{setup['title']}: expected", "held", "seen"), rows, left=3)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]], left: int) -> str:
    """A Markdown table, its first columns aligned to the left and the others to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(columns))]
    lines = [columns, rule, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of compare.py")
    given = parser.parse_args()
    run = json.loads(given.results.read_text())
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), run, str(given.results)))
    print(DOCUMENT)


if __name__ == "__main__":
    main()
