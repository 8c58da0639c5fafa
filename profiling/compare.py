"""Profiles all set-ups at one shape per workload and writes results.json, from which page.py makes the page."""

import json

import environment  # noqa: F401
import session
import setups


def main() -> None:
    parser = session.arguments(__doc__, {"batch": 64, "seq": 128, "dim": 768, "hidden": 3072})
    parser.add_argument("--json", dest="target", help="the file to write; results.json in the folder of the traces")
    given = parser.parse_args()
    left_out = {name: reason for name in setups.IMPLEMENTATIONS if (reason := setups.unavailable(name))}
    chosen = tuple(name for name in setups.IMPLEMENTATIONS if name not in left_out)
    workloads = [
        setups.mlp(given.batch, given.seq, given.dim, given.hidden, chosen),
        setups.linear(1024, 32, 64, compiled=True),
    ]
    results = session.everything(workloads, given.out, left_out)
    target = given.out / "results.json" if given.target is None else given.target
    with open(target, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    for name, reason in left_out.items():
        session.console.print(f"{name}: left out, {reason}")
    session.console.print(f"\n{target}", soft_wrap=True)


if __name__ == "__main__":
    main()
