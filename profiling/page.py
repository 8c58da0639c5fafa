"""Makes the page from results.json: one HTML file without external resources."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().with_name("recording")))
sys.path.insert(0, str(Path(__file__).resolve().with_name("drawing")))
import jinja2
import lanes
import results

TEMPLATES = Path(__file__).with_name("drawing")
WIDE, NARROW = 9.0, 4.2  # inches: a drawing for desktops, and one with letters that are readable on a phone


def make(run: dict, traces: set[str]) -> str:
    """The page of a run; `traces` are the files beside it that it may link to."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    for workload in run["workloads"]:
        workload["drawings"] = {
            name: lanes.draw(workload, width, f"{workload['key']}-{name}")
            for name, width in (("wide", WIDE), ("narrow", NARROW))
        }
    return environment.get_template("page.html.jinja").render(run=run, results=results, traces=traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, default=Path("build/profile/results.json"))
    parser.add_argument("--out", type=Path, help="the page; index.html beside the results")
    given = parser.parse_args()
    target = given.out or given.source.with_name("index.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    traces = {path.name for path in target.parent.glob("*-*.json")}
    target.write_text(make(json.loads(given.source.read_text()), traces))
    print(target)


if __name__ == "__main__":
    main()
