"""kernel-builder's ci-test has the tests and what ships, and none of the tools that the suite stands on: there,
test_kernels_ci.py runs alone."""

from pathlib import Path

if (Path(__file__).parents[1] / "tools").is_dir():
    pytest_plugins = ["suite"]
else:
    collect_ignore_glob = ["*/test_*.py"]
