"""Ways to compute the operations of the package.

Every backend is a module with the same functions over operands that ``functional`` has checked, the activation given
by its code, and ``refusal(op, x)``: why it does not take a call on ``x``, or None if it does. No backend knows another.

``native`` is the one of the compiled ops. A build that has none, for ``rocm`` and ``xpu``, has ``uncompiled`` there.
"""

import json
from pathlib import Path

# The builder's own record of this build.
_METADATA = json.loads(Path(__file__).parent.with_name("metadata.json").read_text())
BUILT_FOR, VERSION = _METADATA["backend"], str(_METADATA["version"])

if BUILT_FOR["type"] in ("cuda", "cpu"):
    from . import native
else:
    from . import uncompiled as native

__all__ = ["BUILT_FOR", "VERSION", "native"]
