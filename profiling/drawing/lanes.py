"""Draws the launches of each set-up of a workload over time, all to one scale, as SVG for a page.

The first launch of each lane starts at zero: if launches take longer than the CPU, it runs ahead of them, which is not
drawn. The colours are variables of the page's style sheet, so that they follow its colour scheme; hovering over a bar
shows its name.
"""

import html
import io
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from results import in_milliseconds, launches, time

# Placeholder colours, replaced by variables when the SVG is written.
_VARIABLES = ("ink", "muted", "surface", "on-bar", "gemm", "pointwise", "fused", "aux", "waiting")
_COLOR = {name: f"#0a00{i:02x}" for i, name in enumerate(_VARIABLES, start=16)}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lanes",
    "font.size": 10,
    "text.color": _COLOR["ink"],
    "axes.edgecolor": _COLOR["muted"],
    "axes.labelcolor": _COLOR["muted"],
    "xtick.color": _COLOR["muted"],
    "ytick.color": _COLOR["ink"],
}
_LETTER_INCHES = 0.085
_MARGIN_INCHES = 0.3  # the figure's, left and right together
_END_LETTERS = 7  # room for the time after a lane
_TICK_LETTERS = 9  # room for a number on the axis, at most six letters, and its distance to the next one


def draw(workload: dict, width_inches: float, prefix: str) -> str:
    """The lanes of a workload; `prefix` makes the ids of this drawing unique in the page."""
    setups, in_ms = workload["setups"], in_milliseconds(workload)
    unit = 1e3 if in_ms else 1.0
    starts = [setup["launches"][0]["start"] for setup in setups]
    lengths = [
        max(launch["end"] for launch in setup["launches"]) - start for setup, start in zip(setups, starts, strict=True)
    ]
    left, right = -max(starts) / unit, max(lengths) / unit
    tooltips = {}
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(width_inches, 0.62 * len(setups) + 0.55), layout="constrained")
        letters_a_unit = (_letters_of(width_inches) - _END_LETTERS) / (right - left)

        def bar(row, start, end, color, tooltip, label=""):
            tooltips[f"bar-{len(tooltips)}"] = tooltip
            axes.barh(
                row,
                (end - start) / unit,
                left=start / unit,
                height=0.5,
                color=_COLOR[color],
                edgecolor=_COLOR["surface"],
                linewidth=0.8,
                gid=f"bar-{len(tooltips) - 1}",
            )
            words = _fitting(label, (end - start) / unit * letters_a_unit)
            center = (start + end) / 2 / unit
            style = {"fontsize": 9, "linespacing": 0.95, "color": _COLOR["on-bar"]}
            axes.text(center, row, words, ha="center", va="center_baseline", **style)

        for row, (setup, origin, length) in enumerate(zip(setups, starts, lengths, strict=True)):
            waited = setup["cpu_before_launch_us"]
            bar(row, -origin, waited - origin, "waiting", f"CPU before the first launch: {time(waited, in_ms=False)}")
            for launch, label in zip(setup["launches"], _labels(setup), strict=True):
                spent = time(launch["end"] - launch["start"], in_ms)
                tooltip = f"{launch['name']}: {spent}"
                bar(row, launch["start"] - origin, launch["end"] - origin, launch["kind"], tooltip, label)
            n = launches(setup)
            title = f"{setup['title']}: {n} launch{'es' if n != '1' else ''}"
            axes.text(left, row - 0.32, title, ha="left", va="bottom", fontsize=10, fontweight="bold")
            end = length / unit + 0.7 / letters_a_unit
            axes.text(end, row, time(length, in_ms), ha="left", va="center", fontsize=9)
        axes.set(xlim=(left, right + _END_LETTERS / letters_a_unit), ylim=(len(setups) - 0.6, -0.75), yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(min(9, int(_letters_of(width_inches) / _TICK_LETTERS))))
        axes.set_xlabel(f"{'ms' if in_ms else 'µs'} since the first launch began to run")
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        svg = io.StringIO()
        figure.savefig(svg, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        plt.close(figure)
    return _for_a_page(svg.getvalue(), tooltips, prefix, f"What each way to compute {workload['title']} launches")


def _letters_of(width_inches: float) -> float:
    """The number of letters that fit into the width of a drawing."""
    return (width_inches - _MARGIN_INCHES) / _LETTER_INCHES


def _labels(setup: dict) -> list[str]:
    """The names of the steps, if the expected number was launched."""
    names = iter(setup["steps"])
    steps = [launch for launch in setup["launches"] if launch["kind"] != "aux"]
    as_expected = len(steps) == len(setup["steps"])
    return [next(names) if as_expected and launch["kind"] != "aux" else "" for launch in setup["launches"]]


def _fitting(label: str, letters: float) -> str:
    """The label in one or two lines of at most `letters` letters, or nothing if it does not fit."""
    words = label.split()
    half = (len(words) + 1) // 2
    in_two = "\n".join((" ".join(words[:half]), " ".join(words[half:])))
    return next((text for text in (label, in_two) if max(map(len, text.split("\n"))) < letters), "")


def _for_a_page(svg: str, tooltips: dict[str, str], prefix: str, description: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg role="img" viewBox="\1">', svg, count=1)
    svg = svg.replace('role="img"', f'role="img" aria-label="{html.escape(description)}"', 1)
    for name, color in _COLOR.items():
        svg = svg.replace(color, f"var(--{name})")
    for gid, words in tooltips.items():
        svg = svg.replace(f'<g id="{gid}">', f'<g id="{gid}" class="bar"><title>{html.escape(words)}</title>')
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
