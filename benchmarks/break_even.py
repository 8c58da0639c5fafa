"""A sentence that says from which M on fusing pays, and where it does not."""

from providers import PARTS

NOISE = 0.02  # ratios this close to 1 are neither a gain nor a loss


def verdict(ratio: float) -> str:
    """The meaning of a time that is `ratio` of the other one's: "pays", "even" or "does not pay"."""
    if ratio < 1 - NOISE:
        return "pays"
    return "even" if ratio <= 1 + NOISE else "does not pay"


def pays_from(ratios: dict[int, float]) -> int | None:
    """The least M from which on every measured M pays, or None where the largest one does not."""
    found = None
    for m in sorted(ratios, reverse=True):
        if verdict(ratios[m]) != "pays":
            break
        found = m
    return found


def sentence(ratios: dict[int, float]) -> str:
    """Say where fusing pays, makes no difference and does not pay, from the ratio at each M."""
    start = pays_from(ratios)
    before = {m: verdict(ratio) for m, ratio in ratios.items() if start is None or m < start}
    if start == min(ratios):
        words = f"fusing pays at every M measured, from {start} to {max(ratios)}"
    elif start is None:
        words = "there is no M from which on fusing pays"
    else:
        words = f"fusing pays from M = {start}"
    for kind, phrase in (("pays", "pays at"), ("even", "makes no difference at"), ("does not pay", "does not pay at")):
        at = sorted(m for m, found in before.items() if found == kind)
        if at:
            words += f"; it {phrase} M in {', '.join(map(str, at))}"
    return words


def ratios(results: list[dict], key: str, other: str | None) -> dict[int, float]:
    """Ours over `other`, or where that is None over the fastest peer that computes the whole, by M."""
    found = {}
    for result in results:
        times = {name: figures[key] for name, figures in result["providers"].items() if name not in PARTS}
        peers = [time for name, time in times.items() if not name.startswith("ours")]
        if "ours" in times and (other in times if other else peers):
            found[result["shape"][0]] = times["ours"] / (times[other] if other else min(peers))
    return found
