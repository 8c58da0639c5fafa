"""Implementations of the package's operations.

Every backend is a module with the same functions. Their operands were checked by ``functional``, and the activation is
given by its code. ``refusal(op, x)`` returns why the backend does not take a call on ``x``, or None if it does.
Backends do not depend on each other.

``native`` holds the compiled ops. A build without any, for ``rocm`` and ``xpu``, uses ``uncompiled`` in its place.
"""

import json
from pathlib import Path

# The builder's record of this build.
_METADATA = json.loads(Path(__file__).parent.with_name("metadata.json").read_text())
BUILT_FOR, VERSION = _METADATA["backend"], str(_METADATA["version"])

if BUILT_FOR["type"] in ("cuda", "cpu"):
    from . import native
else:
    from . import uncompiled as native

__all__ = ["BUILT_FOR", "VERSION", "native"]
