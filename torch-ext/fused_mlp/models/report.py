"""The report of :func:`fuse_mlps`: the outcome of each module, as data and as a table."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, repeat, zip_longest
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

from torch import nn

from . import outcome

_TABLE_WIDTH = 100
_COLUMNS = ("class", "pattern", "fused", "why not", "modules")


@dataclass(frozen=True)
class ModuleReport:
    """The result of ``fuse_mlps`` for one module.

    ``path`` is its path from the model, whose own path is "". ``pattern`` names the MLPs in it. ``extent`` says how far
    it is fused: "full", "partly", "pointwise" or "none". ``reasons`` say why no further; each has a ``code``, the
    ``part`` that it concerns and a ``detail``.
    """

    path: str
    class_name: str
    pattern: str
    extent: str
    reasons: Tuple[outcome.Reason, ...]

    @property
    def fused(self) -> bool:
        """True if it runs as one call on this device, in this dtype and mode."""
        is_part = self.extent == outcome.PARTLY or (self.extent == outcome.POINTWISE and bool(self.reasons))
        return self.extent != outcome.NONE and not is_part

    @property
    def is_mlp(self) -> bool:
        """False for parts other than MLPs: a layer with its activation, a router, the end of an attention."""
        return any(outcome.is_mlp(pattern) for pattern in self.pattern.split(", "))

    @property
    def reason(self) -> str:
        """``reasons`` in words; empty if all is fused."""
        return "; ".join(map(str, self.reasons))


@dataclass
class FusionReport:
    """The outcome of :func:`fuse_mlps`; prints as a table. ``modules`` holds the same as data.

    ``norms`` are norms that run as one op on their own, separately from MLPs and similar modules. ``attentions`` run
    their projections of one input in one call, or their rotary embedding in one op.

    ``[dataclasses.asdict(module) for module in report.modules]`` can be passed to ``json.dumps``. A report does not
    keep the model alive.
    """

    modules: List[ModuleReport] = field(default_factory=list)
    norms: List[ModuleReport] = field(default_factory=list)
    attentions: List[ModuleReport] = field(default_factory=list)
    _restoring: List[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def fused(self) -> List[ModuleReport]:
        """The modules that are fused, by this call or an earlier one."""
        return [module for module in self.modules if module.fused]

    @property
    def left(self) -> List[ModuleReport]:
        """The modules that look like an MLP and were not changed."""
        return [module for module in self.modules if not module.fused]

    def restore(self) -> None:
        """Restore the original methods of every module in ``fused``.

        If a fused method has been wrapped since, the wrapper stays, and the method it wraps runs the original.
        """
        for restore in self._restoring:
            restore()
        self._restoring.clear()

    def _of(self, pattern: str) -> List[ModuleReport]:
        """Return the list that modules with this pattern are reported in."""
        if outcome.is_attention(pattern):
            return self.attentions
        return self.norms if pattern in outcome.NORMS else self.modules

    @property
    def _beside(self) -> List[ModuleReport]:
        return [*self.norms, *self.attentions]

    def __str__(self) -> str:
        if not (self.modules or self._beside):
            return "no MLP found"
        return "\n".join([summary(self.modules, self._beside), *lines([_COLUMNS, *self._rows()])])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return f"<p>{html.escape(summary(self.modules, self._beside))}</p>{in_html([_COLUMNS, *self._rows()])}"

    def _rows(self) -> List[Tuple[str, ...]]:
        """Return the cells of the table; identical modules share a row."""
        rows: Dict[Tuple[str, ...], List[str]] = {}
        for module in (*self.modules, *self._beside):
            extent = "yes" if module.fused else {outcome.NONE: "no"}.get(module.extent, module.extent)
            rows.setdefault((module.class_name, module.pattern, extent, module.reason), []).append(module.path)
        return [(*key, _paths(paths)) for key, paths in rows.items()]


def of_module(path: str, module: nn.Module, found: outcome.Outcome) -> ModuleReport:
    """Return the report of the module at a path, from its outcome."""
    return ModuleReport(path, type(module).__name__, found.pattern, found.extent, found.reasons)


def summary(modules: Sequence[ModuleReport], others: Sequence[ModuleReport] = ()) -> str:
    """Return one sentence that counts the modules which run as one call each."""
    sentence = _of_mlps(modules) if modules else "no MLP found"
    beside = Counter(module.pattern for module in (*modules, *others) if not module.is_mlp and module.fused)
    return "; ".join([sentence, *(f"{count} x {pattern}" for pattern, count in beside.items())])


def _of_mlps(modules: Sequence[ModuleReport]) -> str:
    mlps = [module for module in modules if module.is_mlp]
    fused = [module for module in mlps if module.fused]
    sentence = f"{len(fused)} of {_counted(len(mlps), 'MLP')} {'run' if len(mlps) != 1 else 'runs'} in one call"
    sentence += " each" if len(mlps) != 1 else ""
    if fused and all(outcome.AROUND in module.pattern for module in fused):
        normed = all(outcome.NORMED in module.pattern for module in fused)
        sentence += f", {'norm and residual' if normed else 'residual'} included"
    return sentence


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _paths(paths: Sequence[str]) -> str:
    """Abbreviate the paths of identical modules; * stands for the names that differ."""
    if len(paths) == 1:
        return paths[0] or "the model itself"
    split = [path.split(".") for path in paths]
    if len({len(names) for names in split}) > 1:
        return f"{len(paths)}: {paths[0] or 'the model itself'} ... {paths[-1]}"
    return f"{len(paths)}: {'.'.join(names[0] if len(set(names)) == 1 else '*' for names in zip(*split))}"


def lines(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table that fits a terminal; the cells of its widest columns are wrapped."""
    widths = [max(map(len, column)) for column in zip(*table)]
    while sum(widths) + 2 * (len(widths) - 1) > _TABLE_WIDTH:
        widths[widths.index(max(widths))] -= 1
    for row in table:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths)]
        for line in zip_longest(*cells, fillvalue=""):
            yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()


def in_html(table: Sequence[Sequence[str]]) -> str:
    """A table for notebooks, whose first line is its head."""
    rows = (
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(chain(["th"], repeat("td")), table)
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _wrapped(cell: str, width: int) -> List[str]:
    """Wrap a cell into lines. A path that is too long is broken after a dot, if there is one."""
    lines: List[str] = []
    for word in cell.split(" "):
        for place, piece in enumerate(word.replace(".", ".\0").split("\0") if len(word) > width else [word]):
            joint = "" if place else " "
            if lines and len(lines[-1]) + len(joint) + len(piece) <= width:
                lines[-1] += joint + piece
            else:
                lines += textwrap.wrap(piece, width, break_on_hyphens=False) or [""]
    return lines
