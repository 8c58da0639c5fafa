"""Hashes of source code, by which classes of other libraries are recognised."""

from __future__ import annotations

import hashlib
import inspect
import re
from types import CodeType
from typing import Iterable, Iterator, Optional


def digest(codes: Iterable[Optional[CodeType]]) -> Optional[str]:
    """Return a hash of the source of code, without comments and white space; None if there is none."""
    try:
        sources = [inspect.getsource(code) for code in codes]
    except (OSError, TypeError):
        return None
    bare = re.sub(r"\s+", "", re.sub(r"\s#.*", "", "\n".join(sources)))
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def codes_of(kind: type, names: Iterable[str]) -> Iterator[Optional[CodeType]]:
    """Yield the code of a class's methods. Given a wrapper itself, inspect finds the source of the wrapped function."""
    for name in names:
        found = inspect.getattr_static(kind, name, None)
        found = found.fget if isinstance(found, property) else found
        if found is not None:
            yield getattr(getattr(found, "__func__", found), "__code__", None)
