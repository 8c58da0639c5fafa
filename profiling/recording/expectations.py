"""Expectations of a trace: a claim in words, and a look that returns whether it held and what was seen.

A look gets the recording, and the eager one to compare with. It covers every recorded forward.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from plan import Step
from recorder import Recording
from timeline import AUX, COMPUTES_NOTHING, DYNAMO, GEMM, KINDS, SHELLS, Forward

Look = Callable[[Recording, Recording], tuple[bool, str]]


@dataclass(frozen=True)
class Expectation:
    claim: str
    look: Look


def launches(steps: tuple[Step, ...], unit: str) -> Expectation:
    """Expects one launch per step, of its kind and in order; a library's own copies and fills are not counted."""
    kinds = [step.kind for step in steps]

    def look(recording, eager):
        seen = [_launches_in_words(forward) for forward in recording.forwards]
        held = all([launch.kind for launch in forward.steps] == kinds for forward in recording.forwards)
        return held and bool(seen), "; ".join(dict.fromkeys(seen))

    names = ", ".join(step.name for step in steps)
    return Expectation(f"{len(steps)} {unit}{'s' if len(steps) != 1 else ''} a forward: {names}", look)


def launches_nothing(op: str) -> Expectation:
    def look(recording, eager):
        found = [o for forward in recording.forwards for o in forward.ops if o.name == op]
        computing = sum(o.launches > 0 for o in found)
        return bool(found) and not computing, f"{len(found)} calls, {computing} of them with a launch"

    return Expectation(f"{op} is a view and launches nothing", look)


def without(*ops: str) -> Expectation:
    def look(recording, eager):
        found = Counter(op.name for forward in recording.forwards for op in forward.ops if op.name in ops)
        return not found, ", ".join(f"{n} {name}" for name, n in found.items()) or "none"

    return Expectation(f"no {', no '.join(ops)}", look)


def beneath(outer: str, inner: str, why: str) -> Expectation:
    def look(recording, eager):
        held = [
            any(o.name == outer and any(o.holds(i) and i.name == inner for i in forward.ops) for o in forward.ops)
            for forward in recording.forwards
        ]
        return bool(held) and all(held), f"in {sum(held)} of {len(held)} forwards"

    return Expectation(f"{inner} within {outer}: {why}", look)


def nothing_computes_beneath(prefix: str) -> Expectation:
    def look(recording, eager):
        inner = [
            op.name
            for forward in recording.forwards
            for op in forward.ops
            if any(outer.name.startswith(prefix) and outer.holds(op) for outer in forward.ops)
        ]
        computing = Counter(name for name in inner if name not in COMPUTES_NOTHING | SHELLS)
        return not computing, ", ".join(f"{n} {name}" for name, n in computing.items()) or "views and allocations only"

    return Expectation("no op of PyTorch computes within it", look)


def same_gemms() -> Expectation:
    def look(recording, eager):
        return _compare_names(recording, eager, [GEMM])

    return Expectation("its GEMMs are the ones that eager launches, by name", look)


def same_launches() -> Expectation:
    def look(recording, eager):
        return _compare_names(recording, eager, list(KINDS))

    return Expectation("it launches what eager launches, by name", look)


def dynamo(expected: bool) -> Expectation:
    def look(recording, eager):
        found = [op.name for forward in recording.forwards for op in forward.ops if DYNAMO.match(op.name)]
        times = f"{len(found)} ranges of Dynamo in {len(recording.forwards)} forwards"
        return bool(found) == expected, times

    return Expectation("Dynamo's prologue runs before each forward" if expected else "no prologue of Dynamo", look)


def compilations_on_new_shape(expected: int) -> Expectation:
    def look(recording, eager):
        n = recording.compilations_on_new_shape
        return n == expected, f"{n} compilation{'s' if n != 1 else ''}"

    return Expectation("another shape is compiled anew" if expected else "another shape compiles nothing", look)


def agrees(tolerance: float) -> Expectation:
    def look(recording, eager):
        wanted = eager.answer.double()
        error = ((recording.answer.double() - wanted).norm() / wanted.norm()).item()
        return error <= tolerance, f"{error:.1e}"

    return Expectation(f"its answer is eager's, to a relative error of {tolerance:.0e}", look)


def _launches_in_words(forward: Forward) -> str:
    kinds = ["fused" if launch.kind == "fused" else KINDS[launch.kind] for launch in forward.steps]
    words = f"{len(kinds)}: {', '.join(kinds)}"
    extra = Counter(launch.name.split("(")[0].strip() for launch in forward.launches if launch.kind == AUX)
    return words + "".join(f", and {n} {name}" for name, n in extra.items())


def _compare_names(recording: Recording, eager: Recording, kinds: list[str]) -> tuple[bool, str]:
    def names(forward):
        return Counter(launch.name for launch in forward.launches if launch.kind in kinds)

    wanted = [names(forward) for forward in eager.forwards]
    seen = [names(forward) for forward in recording.forwards]
    same = bool(seen) and bool(wanted) and all(counts == wanted[0] for counts in (*wanted, *seen))
    if same:
        return True, ", ".join(f"{n} {name}" for name, n in seen[0].items())
    others = (seen[0] - wanted[0]) if seen and wanted else Counter()
    missing = (wanted[0] - seen[0]) if seen and wanted else Counter()
    return False, f"only here: {', '.join(others) or 'none'}; only in eager: {', '.join(missing) or 'none'}"
