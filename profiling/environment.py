"""Imported before the rest: sets the search path for modules in other folders, and environment variables."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().with_name("recording")))
sys.path.insert(0, str(Path(__file__).resolve().with_name("drawing")))
import project

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it on import, which the next line does
os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
