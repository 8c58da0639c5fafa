"""A sentence that says from which M on fusion pays, and where it does not."""

from typing import NamedTuple

from providers import PARTS

from measure import timing

_WORDS = {"faster": "pays", "slower": "does not pay"}


class Ratio(NamedTuple):
    """The ratio of two times, and the wider of their spreads over turns."""

    value: float
    spread: float = 0.0

    @property
    def is_noisy(self) -> bool:
        return self.spread > timing.NOISY

    @property
    def verdict(self) -> str:
        """The meaning for a user: "pays", "even", "does not pay" or "too noisy to tell"."""
        found = timing.verdict(self.value, self.spread)
        return _WORDS.get(found, found)


def pays_from(ratios: dict[int, Ratio]) -> int | None:
    """The smallest M from which on every measured M pays, or None if the largest one does not."""
    found = None
    for m in sorted(ratios, reverse=True):
        if ratios[m].verdict != "pays":
            break
        found = m
    return found


def sentence(ratios: dict[int, Ratio]) -> str:
    """Says at which M fusing pays, makes no difference, does not pay or cannot be judged, from the ratio at each M."""
    start = pays_from(ratios)
    before = {m: ratio.verdict for m, ratio in ratios.items() if start is None or m < start}
    if start == min(ratios):
        words = f"fusing pays at every M measured, from {start} to {max(ratios)}"
    elif start is None:
        words = "there is no M from which on fusing pays"
    else:
        words = f"fusing pays from M = {start}"
    for kind, phrase in (
        ("pays", "pays at"),
        ("even", "makes no difference at"),
        ("does not pay", "does not pay at"),
        ("too noisy to tell", "is too noisy to tell at"),
    ):
        at = sorted(m for m, found in before.items() if found == kind)
        if at:
            words += f"; it {phrase} M in {', '.join(map(str, at))}"
    return words


def ratios(results: list[dict], key: str, other: str | None) -> dict[int, Ratio]:
    """Ratios of ours to `other`, or if that is None to the fastest peer that computes the whole, by M."""
    found = {}
    for result in results:
        times = {name: figures[key] for name, figures in result["providers"].items() if name not in PARTS}
        peers = [name for name in times if not name.startswith("ours")]
        if "ours" in times and (other in times if other else peers):
            peer = other or min(peers, key=times.get)
            found[result["shape"][0]] = ratio(result, key, "ours", peer)
    return found


def ratio(result: dict, key: str, name: str, other: str) -> Ratio:
    """The ratio of two providers' times at a shape. Runs without a recorded spread count as quiet."""
    one, base = result["providers"][name], result["providers"][other]
    return Ratio(one[key] / base[key], max(each.get(f"{key}_spread", 0.0) for each in (one, base)))
