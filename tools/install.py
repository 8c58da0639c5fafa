#!/usr/bin/env python3
"""Runs `pip install` with the given arguments, showing its progress in one line and any error in another.

pip's other output only helps to debug pip itself: run pip by hand for that.
"""

import importlib.util
import re
import subprocess
import sys

BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
# pip's messages: about a wheel that it downloads, and about an index that it cannot reach.
FETCHED = re.compile(r"\s+(?:Downloading|Using cached) (?:\S*/)?([^/\s]+?)-\d\S* \(([\d.]+) (kB|MB|GB)\)")
UNREACHABLE = re.compile(r"Retrying \(Retry\(|connection broken by|Failed to establish a new connection")


def main() -> None:
    arguments = sys.argv[1:]
    print(f"Installing {announced(arguments)}", flush=True)
    # Python compiles modules on import; pip would compile all of them, which takes longer than the rest of its work.
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    said, size, packages = [], 0.0, 0
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
            for line in pip.stdout:
                said.append(line)
                if wheel := FETCHED.match(line):
                    size, packages = size + float(wheel[2]) * BYTES[wheel[3]], packages + 1
                    show(f"{packages} packages, {size / 1e6:,.0f} MB: {wheel[1]}")
                elif line.startswith("Installing collected packages"):
                    show(f"{packages} packages, {size / 1e6:,.0f} MB: unpacking them")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; the next run installs what is missing")
    show("")
    if pip.returncode != 0:
        sys.exit(f"error: {fault(said)}")


def announced(arguments: list[str]) -> str:
    """The packages that will be installed, and their size."""
    what = " ".join(argument for argument in arguments if not argument.startswith("-"))
    if sys.platform != "linux" or "--no-deps" in arguments or importlib.util.find_spec("torch") is not None:
        return what
    return f"{what}: up to 3 GB with PyTorch, which brings the libraries of CUDA; 2 minutes on a fast line"


def show(words: str) -> None:
    """Replaces the progress line on a terminal; prints none elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\033[K{words[:79]}", end="", flush=True)


def fault(said: list[str]) -> str:
    """pip's error in one line."""
    if any(map(UNREACHABLE.search, said)):
        return "pip reaches no package index: is there a network, and does it need a proxy (pip config list)?"
    reasons = [line.removeprefix("ERROR: ").strip() for line in said if line.startswith("ERROR: ")]
    return f"pip failed: {'; '.join(reasons) or ''.join(said[-1:]).strip()}"


if __name__ == "__main__":
    main()
