"""Rows of one measurement as files that people read: JSON with a row per line, and CSV."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lln.records import files, machine
from lln.records.rows import Row


def save_json(
    content: dict[str, list[Row]], folder: Path, *, subject: str, device: str = "cpu"
) -> Path:
    """Write lists of rows as ``subject_hardware_date.json``."""
    date = datetime.date.today().isoformat()
    name = f"{subject}_{machine.slug(device)}_{date}.json"
    return files.write_text(folder / name, as_json({"subject": subject, "date": date, **content}))


def as_json(content: dict[str, Any]) -> str:
    """JSON with one row per line, so that a change shows as a changed line."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list):
            lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in value)
            parts.append(f'  "{key}": [\n{lines}\n  ]')
        else:
            parts.append(f'  "{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, columns in the order of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
