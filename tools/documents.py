"""Markdown written by the tools: tables, and documents with generated sections.

A section lies between `<!-- filled: NAME -->` and `<!-- end -->`; the rest of a document is unchanged.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

_PART = re.compile(r"(<!-- filled: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> str:
    """A table whose first `left` columns are left-aligned and the others right-aligned; without `left`, none is."""
    rule = ["---" if left is None or i < left else "---:" for i in range(len(columns))]
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (columns, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """The document with its parts replaced by those of the same names; raises ValueError for an unknown name."""

    def replace(match: re.Match) -> str:
        if match[2] not in parts:
            raise ValueError(f"no part is called {match[2]!r}; there are {', '.join(parts)}")
        return f"{match[1]}{parts[match[2]]}\n{match[3]}"

    return _PART.sub(replace, text)
