"""kernel-builder's ci-test has the tests and the shipped files but not the tools that the suite needs; there, only
test_kernels_ci.py runs.
"""

from pathlib import Path

if (Path(__file__).parents[1] / "tools").is_dir():
    pytest_plugins = ["suite"]
else:
    collect_ignore_glob = ["*/test_*.py"]
