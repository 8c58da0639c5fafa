"""The page and the document made from a profile: their contents, and the page as shown in a browser."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest

import project
import traces

sys.path.append(str(project.ROOT / "profiling"))

import browser
import document
import figures
import page
import results
import session
import setups
import timeline

RESULTS = project.ROOT / "profiling" / "results"
COMMITTED = RESULTS / "cpu.json"
needs_browser = pytest.mark.skipif(
    browser.missing() is not None,
    reason=f"{browser.missing()}: the page was not opened (Debian: apt-get install chromium chromium-driver)",
)


def test_the_document_says_what_was_measured():
    text = document.DOCUMENT.read_text()
    source = re.search(r"Tables filled by `python profiling/document.py (\S+)`", text)[1]
    run = json.loads((project.ROOT / source).read_text())
    assert document.fill(text, run, source) == text
    changed = json.loads(json.dumps(run))
    changed["workloads"][0]["setups"][0]["expectations"][0]["held"] = False
    assert "**no**" in document.fill(text, changed, source)
    assert document.fill(text.replace("| yes |", "| maybe |"), run, source) == text


def test_noise_has_no_ratio():
    """Noisy times get no ratio, in the document or on the page. Older runs took no turns, and say nothing of noise."""
    run = json.loads(COMMITTED.read_text())
    workload = run["workloads"][0]
    assert "noisy" not in str(results.comparison(workload))
    for spread, count in ((0.15, 0), (0.16, 1)):
        workload["noisy_above"], workload["setups"][1]["wall_us_spread"] = 0.15, spread
        assert str(results.comparison(workload)).count("'noisy'") == count


def test_the_committed_page():
    """The committed page is page.py's for the document's run, except for the drawings, and has no dead links."""
    committed = RESULTS / "h100.html"
    assert f"(../profiling/results/{committed.name})" in document.DOCUMENT.read_text()
    html = committed.read_text()
    made = page.make(json.loads((RESULTS / "h100.json").read_text()), set())
    drawing = re.compile("<svg.*?</svg>", re.DOTALL)
    assert drawing.sub("", html) == drawing.sub("", made)
    assert len(drawing.findall(html)) == len(drawing.findall(made))
    assert not re.findall(r'<a [^>]*href="(?!#)', html)


@pytest.fixture(scope="module", params=["cpu", "h100"])
def made_page(request, tmp_path_factory):
    """Makes the page of a committed run with a planted set-up of all kinds of launches, and one trace to link."""
    run = json.loads((RESULTS / f"{request.param}.json").read_text())
    forward = timeline.middle(traces.eager_mlp().read())
    planted = dict(run["workloads"][0]["setups"][0])
    planted |= {
        "key": "planted",
        "title": "a <GPU>",
        "launches": [vars(launch) for launch in forward.launches],
        "busy_us": forward.busy_us,
        "latency_us": forward.latency_us,
        "expectations": [{"claim": "a claim", "held": False, "seen": "a name_" + "without_spaces_" * 40}],
    }
    run["workloads"][0]["setups"].append(planted)
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page.make(run, {"mlp-eager.json"}))
    return path, run


def test_the_page_is_one_small_file(made_page):
    path, _ = made_page
    html = path.read_text()
    assert path.stat().st_size < 500_000
    assert "a &lt;GPU&gt;" in html and "a <GPU>" not in html
    assert html.count('href="mlp-eager.json"') == 2  # eager's, and the planted set-up's, which is a copy of it
    assert 'href="mlp-ours.json"' not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_from_a_recording_to_a_page(tmp_path):
    workload = setups.linear(8, 16, 16, compiled=False)
    found = session.run(workload, tmp_path)
    run = json.loads(COMMITTED.read_text())
    run["workloads"] = json.loads(json.dumps([figures.of_workload(workload, found, 1e12, 1e10)]))
    html = page.make(run, {found[0]["trace"]})
    assert "eager nn.Linear: 1 launch<" in html
    assert 'href="linear-eager.json"' in html


def test_the_page_without_torch(tmp_path):
    """The page can be made from its data without PyTorch."""
    blocked = tmp_path / "torch.py"
    blocked.write_text("raise ImportError('no torch here')\n")
    command = [
        sys.executable,
        project.ROOT / "profiling" / "page.py",
        "--from",
        COMMITTED,
        "--out",
        tmp_path / "p.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.html").stat().st_size > 10_000


@pytest.fixture(scope="module")
def chromium():
    with browser.opened() as driver:
        yield driver


LANES = """
return [...document.querySelectorAll('figure')].filter(f => f.getBoundingClientRect().width > 0).map(f => ({
    bars: [...f.querySelectorAll('.bar path')].map(p => getComputedStyle(p).fill),
    starts: [...f.querySelectorAll('.bar path')].map(p => p.getBoundingClientRect().left),
    titles: f.querySelectorAll('.bar title').length,
    words: [...f.querySelectorAll('text')].map(t => t.textContent),
    numbers: [...f.querySelectorAll('text')].filter(t => /^\u2212?[\\d.]+$/.test(t.textContent))
        .map(t => [t.getBoundingClientRect().left, t.getBoundingClientRect().right, t.getBoundingClientRect().height]),
    smallest: Math.min(...[...f.querySelectorAll('text')].map(t => t.getBoundingClientRect().height)),
}))
"""
SCREENS = [("light", 1200, 900), ("dark", 1200, 900), ("light", 375, 800), ("dark", 390, 844)]


@needs_browser
@pytest.mark.parametrize(("scheme", "width", "height"), SCREENS)
def test_the_page_in_a_browser(chromium, made_page, scheme, width, height):
    path, run = made_page
    browser.requested(chromium)
    browser.show(chromium, path, scheme, width, height)
    lanes = chromium.execute_script(LANES)
    assert len(lanes) == len(run["workloads"])
    for shown, workload in zip(lanes, run["workloads"], strict=True):
        launches = [launch for setup in workload["setups"] for launch in setup["launches"]]
        assert len(shown["bars"]) == shown["titles"] == len(launches) + len(workload["setups"])
        firsts = itertools.accumulate((len(setup["launches"]) + 1 for setup in workload["setups"][:-1]), initial=1)
        assert len({round(shown["starts"][first]) for first in firsts}) == 1  # the lanes' first launches are aligned
        assert all(any(setup["title"] in words for words in shown["words"]) for setup in workload["setups"])
        assert shown["smallest"] >= 9  # pixels: legible letters
        numbers = sorted(shown["numbers"])
        assert len(numbers) >= 3
        assert all(right + 3 * height <= left for (_, right, height), (left, *_) in itertools.pairwise(numbers))
    rows = chromium.execute_script(
        "return [...document.querySelectorAll('.comparison')].map(t => [...t.querySelectorAll('tbody tr')]"
        ".map(r => [...r.children].map(c => c.getBoundingClientRect().height > 0 && c.textContent)))"
    )
    assert rows == [[list(row) for row in results.comparison(workload)] for workload in run["workloads"]]
    assert overflow(chromium) == 0
    chromium.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert overflow(chromium) == 0
    dark = luminance(chromium, "document.body", "backgroundColor") < 0.2
    assert dark == (scheme == "dark")
    assert (luminance(chromium, "document.body", "color") > 0.7) == dark
    assert fetched(chromium, path) == []


@needs_browser
def test_the_browser_sees_faults(chromium, made_page, tmp_path):
    """The checks detect an element that is too wide and a resource that is fetched."""
    path, _ = made_page
    faulty = tmp_path / "faulty.html"
    planted = '<div style="width: 2000px">wide</div><img src="http://127.0.0.1:9/picture.png">'
    faulty.write_text(path.read_text().replace("</main>", f"{planted}</main>"))
    browser.requested(chromium)
    browser.show(chromium, faulty, "light", 375, 800)
    assert overflow(chromium) > 1000
    assert fetched(chromium, faulty) == ["http://127.0.0.1:9/picture.png"]


def overflow(driver):
    """Returns the number of pixels by which the page is wider than the screen."""
    return driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")


def fetched(driver, path):
    """Returns the requests other than the page itself, from the request log and from the page."""
    own = path.resolve().as_uri()
    entries = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    return sorted(
        {address for address in (*browser.requested(driver), *entries) if address != own and "data:" not in address}
    )


def luminance(driver, element, property_):
    words = driver.execute_script(f"return getComputedStyle({element}).{property_}")
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", words)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
