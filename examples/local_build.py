"""Points the kernels library to what `make build` has built, in place of the Hub. With the Hub, leave it out."""

import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import project

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
logging.getLogger("kernels").setLevel(logging.ERROR)  # it warns of every class for which there is no layer

REPO_ID, VERSION = project.repo_id(), project.version()
