"""A page as a real browser lays it out."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANGS

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
DARK = "--blink-settings=preferredColorScheme=0"
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")


def write_probed(path: Path, page: str, probe: str) -> Path:
    """A page with a script; ``probe`` puts what it finds into ``document.body.dataset.seen``."""
    script = f"<script>{probe}</script></body>"
    path.write_text(page.replace("</body>", script), encoding="utf-8")
    return path


def look(report: Path, profile: Path, width: int, *flags: str) -> Any:
    """What the probe has seen in a window of this width."""
    assert BROWSER is not None
    command = [BROWSER, *QUIET.split(), *flags, f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, f"--window-size={width},900", "--dump-dom", report.as_uri()],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    seen = re.search(r'data-seen="([^"]+)"', done.stdout)
    assert seen is not None, done.stderr[-2000:]
    return json.loads(html.unescape(seen[1]))
