"""Imported before the rest: where the modules are that other folders hold, and what is read from the environment."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().with_name("recording")))
sys.path.insert(0, str(Path(__file__).resolve().with_name("drawing")))
import project

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it when it is imported, as the next line does
os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
