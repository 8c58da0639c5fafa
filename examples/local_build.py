"""Points the kernels library to the output of `make build` instead of the Hub. With the Hub, leave this out."""

import importlib.metadata
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import project

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
logging.getLogger("kernels").setLevel(logging.ERROR)  # it warns about every class without a layer

REPO_ID, VERSION = project.repo_id(), project.version()


def need_kernels_in_transformers() -> None:
    """Exits if transformers ignores the installed version of kernels, and would go on without it."""
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        versions = (f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "kernels"))
        wanted = f"from {import_utils.KERNELS_MIN_VERSION} on and below {import_utils.KERNELS_MAX_VERSION}"
        sys.exit(f"error: {' does not take '.join(versions)}: it needs one {wanted}")
