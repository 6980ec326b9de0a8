"""Changes that were drawn once and are found again by the lines they stand in.

``stored.json`` holds the 240 changes of 2026-11-18, of which 186 were noticed. Of the 188 that
still applied on 2026-11-19 all tests noticed 165, those of ``make test`` 150. A refactoring moves
lines to other files; a change whose lines are nowhere, or in several places, no longer applies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.mutation.mutants import Mutant

FILE = Path(__file__).with_name("stored.json")
PACKAGES = ("lln", "lln_study")


def stored(root: Path) -> Iterator[Mutant]:
    """The stored changes that still apply, in the tree below ``root``."""
    sources = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        lines = entry["lines"].encode()
        places = [path for path, source in sources.items() if source.count(lines) == 1]
        here = entry["path"] if entry["path"] in places else places[0] if len(places) == 1 else None
        if here is None:
            continue
        source, before = sources[here], entry["before"]
        start = source.index(lines) + entry["at"]
        yield Mutant(
            here,
            source.count(b"\n", 0, start) + 1,
            entry["operator"],
            start,
            start + len(before.encode()),
            before,
            entry["after"],
            hashlib.sha256(source).hexdigest()[:12],
        )
