"""The report of :func:`fuse_mlps`: what became of each module, as data and as a table."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

from torch import nn

from . import outcome

_TABLE_WIDTH = 100
_COLUMNS = ("class", "pattern", "fused", "why not", "modules")


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module.

    ``path`` leads to it from the model, which has itself the path "". ``pattern`` names the MLPs in it. ``extent`` says
    how far it is fused: "full", "pointwise", "partly", "none"; ``reasons`` why it is not more, each with a ``code``,
    the ``part`` that it is about and a ``detail``.
    """

    path: str
    class_name: str
    pattern: str
    extent: str
    reasons: Tuple[outcome.Reason, ...]

    @property
    def fused(self) -> bool:
        """Whether any of it is fused."""
        return self.extent != outcome.NONE

    @property
    def reason(self) -> str:
        """``reasons`` in words; empty where all is fused."""
        return "; ".join(map(str, self.reasons))


@dataclass
class FusionReport:
    """The outcome of :func:`fuse_mlps`: prints as a table; ``modules`` is the same as data.

    ``[dataclasses.asdict(module) for module in report.modules]`` is what ``json.dumps`` takes. A report does not keep
    the model alive.
    """

    modules: List[ModuleReport] = field(default_factory=list)
    _restoring: List[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def fused(self) -> List[ModuleReport]:
        """The modules that are fused, by this call or by an earlier one."""
        return [module for module in self.modules if module.fused]

    @property
    def left(self) -> List[ModuleReport]:
        """The modules that look like an MLP and were left as they were."""
        return [module for module in self.modules if not module.fused]

    def restore(self) -> None:
        """Gives every module in ``fused`` its own methods back.

        Where somebody has wrapped a fused method since, the wrapper stays, and what it wraps runs the original.
        """
        for restore in self._restoring:
            restore()
        self._restoring.clear()

    def __str__(self) -> str:
        if not self.modules:
            return "no MLP found"
        rows: Dict[Tuple[str, ...], List[str]] = {}
        for module in self.modules:
            extent = {outcome.FULL: "yes", outcome.NONE: "no"}.get(module.extent, module.extent)
            rows.setdefault((module.class_name, module.pattern, extent, module.reason), []).append(module.path)
        table = [_COLUMNS, *((*key, _paths(paths)) for key, paths in rows.items())]
        return "\n".join([counts(self.modules), *_lines(table)])


def of_module(path: str, module: nn.Module, found: outcome.Outcome) -> ModuleReport:
    """What the outcome says of a module of that path."""
    return ModuleReport(path, type(module).__name__, found.pattern, found.extent, found.reasons)


def counts(modules: Sequence[ModuleReport]) -> str:
    """How many modules are fused, and how many are not."""
    fused = sum(module.fused for module in modules)
    return f"{fused} fused, {len(modules) - fused} left"


def _paths(paths: Sequence[str]) -> str:
    """The paths of modules that are alike, in short: * stands for what differs in them."""
    if len(paths) == 1:
        return paths[0] or "the model itself"
    split = [path.split(".") for path in paths]
    if len({len(names) for names in split}) > 1:
        return f"{len(paths)}: {paths[0] or 'the model itself'} ... {paths[-1]}"
    return f"{len(paths)}: {'.'.join(names[0] if len(set(names)) == 1 else '*' for names in zip(*split))}"


def _lines(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table that is no wider than a terminal: the cells of its widest columns are broken."""
    widths = [max(map(len, column)) for column in zip(*table)]
    while sum(widths) + 2 * (len(widths) - 1) > _TABLE_WIDTH:
        widths[widths.index(max(widths))] -= 1
    for row in table:
        cells = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths)]
        for line in zip_longest(*cells, fillvalue=""):
            yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
