"""The result row of a conversion: what was measured, and what names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lln.records.rows import Row
from lln.records.spelling import as_stored


def row_of(found: Mapping[str, Any]) -> Row:
    """A row of ``results/conversion.jsonl``: what was measured, without curves and texts."""
    configuration = {**found["settings"], "options": found["options"], "length": found["length"]}
    configuration |= {"model": found["model"], "data": found["corpus"]}  # wherever they lay
    if configuration["held_out"]:
        configuration["held_out"] = Path(configuration["held_out"]).name
    seed = configuration.pop("seed")
    left_out = ("curves", "texts", "settings", "seed", "near_shares", "needles")
    errors = {
        f"layer_error_{name}": sum(values) / len(values)
        for name, values in found["layer_errors"].items()
    }
    return {
        "subject": "conversion",
        "mechanism": found["attention"],
        **{name: value for name, value in found.items() if name not in left_out},
        **errors,
        "near_share": _mean(row["near_share"] for row in found["near_shares"]),
        "needles": found.get("needles", []),
        "seed": seed,
        "configuration": configuration,
        "digest": digest_of(found["settings"]),
    }


def digest_of(decisive: Mapping[str, Any]) -> str:
    """What names the rows of these settings, whatever their seed and wherever their files lie."""
    asked = {name: value for name, value in decisive.items() if name != "seed"}
    for name in ("model", "data", "held_out"):
        asked[name] = asked[name] and Path(asked[name]).name
    text = json.dumps(as_stored(asked), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
