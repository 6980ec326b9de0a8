"""The page in a real browser: it fits a phone and a desk, and follows light and dark."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from lln.study.page import Page, Plot, Plots, Section, Table, Text, render
from lln.study.plots.lines import Axis, Series, line_plot

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
# Layout as the browser sees it, written into the document so that --dump-dom shows it.
PROBE = """<script>
const plot = document.querySelector("svg").getBoundingClientRect();
const ink = getComputedStyle(document.querySelector("svg text")).fill;
document.body.dataset.seen = JSON.stringify([
  document.documentElement.scrollWidth, innerWidth, Math.round(plot.width), ink]);
</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    curve = Series("a curve", [512, 1024, 2048], [1.0, 2.0, 4.0])
    axes = {"x": Axis("N", log=True, ticks=[512, 1024, 2048]), "y": Axis("ms")}
    plots = [Plot(line_plot(name, [curve], title="Title", **axes)) for name in ("one", "two")]
    wide = Table([f"column {n}" for n in range(14)], [["a long cell"] * 14] * 3)
    blocks = [Text("Some words. " * 40), Plots(plots), wide]
    html = render(
        Page("A report", "Its lede.", [Section("Section", blocks)], {"device": "x" * 120})
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    return path


def look(report, tmp_path, width: int, *flags: str) -> tuple[int, int, int, str]:
    """Width of the document and of the window, width of the first plot, colour of its text."""
    assert BROWSER is not None
    command = [BROWSER, *QUIET.split(), *flags, f"--user-data-dir={tmp_path}"]
    done = subprocess.run(
        [*command, f"--window-size={width},900", "--dump-dom", report.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    seen = re.search(r'data-seen="\[(\d+),(\d+),(\d+),&quot;([^&]+)&quot;\]"', done.stdout)
    assert seen is not None, done.stderr[-2000:]
    return int(seen[1]), int(seen[2]), int(seen[3]), seen[4]


@pytest.mark.parametrize("width", [500, 1300])
def test_nothing_sticks_out(report, tmp_path, width):
    document, window, plot, _ = look(report, tmp_path, width)
    assert document <= window
    assert plot >= 0.3 * window


def test_dark_mode_changes_the_ink(report, tmp_path):
    *_, light = look(report, tmp_path / "light", 800)
    *_, dark = look(report, tmp_path / "dark", 800, "--blink-settings=preferredColorScheme=0")
    assert light == "rgb(28, 32, 38)"
    assert dark == "rgb(230, 233, 238)"
