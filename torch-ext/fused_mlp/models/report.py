"""The report of :func:`fuse_mlps`: what became of each module, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Tuple


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module: its path, its class, the patterns it holds, whether it was fused and why."""

    path: str
    class_name: str
    pattern: str
    fused: bool
    reason: str


@dataclass
class FusionReport:
    """The outcome of :func:`fuse_mlps`: prints as a table; ``modules`` is the same as data.

    ``[dataclasses.asdict(module) for module in report.modules]`` is what ``json.dumps`` takes.
    """

    modules: List[ModuleReport] = field(default_factory=list)
    _restoring: List[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def fused(self) -> List[ModuleReport]:
        """The modules that were fused."""
        return [module for module in self.modules if module.fused]

    @property
    def left(self) -> List[ModuleReport]:
        """The modules that look like an MLP and were left as they were."""
        return [module for module in self.modules if not module.fused]

    def restore(self) -> None:
        """Gives every module that was fused its own methods back.

        Where somebody has wrapped a fused method since, the wrapper stays, and what it wraps runs the original.
        """
        for restore in self._restoring:
            restore()
        self._restoring.clear()

    def __str__(self) -> str:
        head = f"{len(self.fused)} fused, {len(self.left)} left"
        rows: Dict[Tuple[str, ...], List[str]] = {}
        for module in self.modules:
            key = (module.class_name, module.pattern, "yes" if module.fused else "no", module.reason)
            rows.setdefault(key, []).append(module.path)
        table = [("class", "pattern", "fused", "reason", "modules")]
        for key, paths in rows.items():
            table.append((*key, paths[0] if len(paths) == 1 else f"{len(paths)}: {paths[0]} ... {paths[-1]}"))
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([head, *lines])
