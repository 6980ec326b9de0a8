"""Result rows as sweeps write them: read from ``results/``, grouped, averaged over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.records.rows import read_rows
from lln.records.spelling import as_given

Row = Mapping[str, Any]
NAMES = {
    "softmax": "Softmax",
    "softmax_eager": "Softmax (eager)",
    "lln": "LLN",
    "lln_authors": "LLN as the authors' code",
    "lln_diag": "LLN+Diag",
    "lln_nearfar": "Near and far",
    "block_diag": "Diag",
    "elu": "ELU",
    "tnn": "TNN",
    "rfa": "RFA",
    "knn": "kNN",
    "relu": "ReLU",
    "cosformer": "cosFormer",
    "flash": "FLASH",
    "nystromformer": "Nyströmformer",
    "polaformer": "PolaFormer",
    "transformer_ls": "Transformer-LS",
    "transnormer_t1": "TransNormer T1",
    "transnormer_t2": "TransNormer T2",
}
# Options that tables and figures show often, in few words.
WORDS = {"mix": "{} mix", "near": "C = {}", "conv": "conv {}", "normalize_keys": "unbiased"}
WORDS["half_products"] = "bf16 products"
# In the order of the paper's tables, others after them.
ORDER = (
    *("softmax_eager", "softmax", "reformer", "performer", "elu", "longformer", "transformer_ls"),
    *("tnn", "transnormer_t2", "cosformer", "transnormer_t1", "flash", "nystromformer"),
    *("linformer", "skyformer", "polaformer", "block_diag", "lln", "lln_authors"),
    "lln_diag",
)
# Of these options are no part of what was published.
PLAIN = ("softmax", "softmax_eager", "block_diag", "lln", "lln_authors", "lln_diag")

# What two pre-trainings must share to be compared or averaged, beside mechanism, rate and seed.
SETTING = (
    *("recipe", "layers", "width", "heads", "length", "batches", "steps", "batch_size"),
    *("corpus", "tokens_digest", "precision", "dropout", "deviation", "positions"),
)
# Without these a line of a file is not a result.
NEEDED = frozenset({"subject", "mechanism", "digest", "seed", "configuration"})
OLDER = {"positions": "normal"}  # of rows written before there was a choice


def was_alone(row: Row) -> bool:
    """Whether a run had its device for itself, so that its speed says something."""
    return not row.get("shared", False)


def setting(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :data:`SETTING` of a pre-training."""
    return {name: configuration.get(name, OLDER.get(name)) for name in SETTING}


def read(folder: Path, subject: str | None = None) -> list[Row]:
    """The rows of all ``*.jsonl`` files of a folder; of rows with one digest and seed the last.

    A line that ends in the middle, which a killed process may leave as the last of a file, does
    not count; neither do curves.

    Args:
        subject: Only these: "mlm", "glue", "vit", "lra", "step".
    """
    found: dict[Hashable, Row] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in map(as_given, read_rows(path)):
            if "rows" in row or not row.keys() >= NEEDED or subject not in (None, row["subject"]):
                continue
            found[row["subject"], row["digest"], row["seed"]] = row
    return list(found.values())


def read_curves(folder: Path) -> list[Row]:
    """The curves in the files of a folder: ``rows`` beside what names their run."""
    paths = sorted(folder.glob("*.jsonl"))
    lines = (as_given(line) for path in paths for line in read_rows(path))
    return [line for line in lines if line.get("rows") and line.keys() >= NEEDED]


def newest(results: Path, subject: str) -> Path | None:
    """The newest ``subject_hardware_date.json``, or None if there is none."""
    found = sorted(results.glob(f"{subject}_*.json"), key=lambda path: path.stem.split("_")[-1])
    return found[-1] if found else None


def latest(results: Path, subject: str) -> dict[str, Any] | None:
    """The content of that file."""
    path = newest(results, subject)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def grouped(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> dict[Any, list[Row]]:
    """Rows by a key, in the order in which keys appear."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def in_paper_order(row: Row) -> tuple[int, str, int, str]:
    """Return the key that sorts mechanisms as the paper does, plain options before others."""
    name = row["mechanism"]
    place = ORDER.index(name) if name in ORDER else len(ORDER)
    return place, name, len(options(row)), options(row)


def options(row: Row) -> str:
    """Options of the mechanism as text, equal for equal options."""
    return json.dumps(row["configuration"].get("options") or {}, sort_keys=True)


def mechanism(row: Row) -> str:
    """The mechanism with its options, for people.

    Example:
        >>> mechanism({"mechanism": "lln_diag", "configuration": {"options": {"conv": 33}}})
        'LLN+Diag (conv 33)'
    """
    name: str = row["mechanism"]
    shown = NAMES.get(name) or name.replace("_", " ").capitalize()
    given = row["configuration"].get("options") or {}
    words = [_words(key, value) for key, value in given.items()]
    return f"{shown} ({', '.join(words)})" if words else shown


def _words(option: str, value: Any) -> str:
    if option == "method":
        return str(value)
    if option == "near" and isinstance(value, Mapping):
        more = [f"{name}={each}" for name, each in value.items() if name != "block"]
        return ", ".join([WORDS[option].format(value["block"]), *more])
    if option in WORDS and value is not False:
        return WORDS[option].format(value)
    return option if value is True else f"{option}={value}"


def record_of(
    records: Iterable[Mapping[str, Any]], mechanism: str, options: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The record of a table for a mechanism with these options, if it has one."""
    own = (row for row in records if row["mechanism"] == mechanism)
    return next((row for row in own if dict(row["options"]) == dict(options)), None)


def as_published(records: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Records by mechanism: LLN's and softmax without options, which are ours, others as given."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in records:
        if row["mechanism"] not in PLAIN or not row["options"]:
            found.setdefault(row["mechanism"], row)
    return found


def best_rates(trained: Iterable[Row]) -> dict[tuple[str, str], float | None]:
    """The learning rate of every mechanism whose validation loss is lowest, a mean over seeds."""
    chosen: dict[tuple[str, str], float | None] = {}
    for variant, own in grouped(trained, lambda row: (mechanism(row), options(row))).items():
        means = {
            rate: Mean.of(row["loss"] for row in rows) for rate, rows in grouped(own, _rate).items()
        }
        known = {rate: mean.value for rate, mean in means.items() if mean is not None}
        chosen[variant] = min(known, key=lambda rate: known[rate]) if known else None
    return chosen


def _rate(row: Row) -> float | None:
    return row["configuration"].get("learning_rate")


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error, None for a single one."""

    value: float
    error: float | None
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> Mean | None:
        """Average what is known; None without a value."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        mean = sum(known) / len(known)
        if len(known) == 1:
            return Mean(mean, None, 1)
        variance = sum((value - mean) ** 2 for value in known) / (len(known) - 1)
        return Mean(mean, math.sqrt(variance / len(known)), len(known))

    def text(self, digits: int = 1, factor: float = 1.0) -> str:
        """``91.2 ± 0.3``; the error only where there are several seeds."""
        error = "" if self.error is None else f" ± {self.error * factor:.{digits}f}"
        return f"{self.value * factor:.{digits}f}{error}"


def shown(mean: Mean | None, digits: int = 1, factor: float = 1.0) -> str:
    """The text of a mean in a table; – for none."""
    return "–" if mean is None else mean.text(digits, factor)


def value(mean: Mean | None) -> float | None:
    """The number of a mean in a record."""
    return None if mean is None else mean.value


def record(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What every record of a table begins with: the mechanism, and where its rows come from."""
    first = rows[0]
    options = first["configuration"].get("options") or {}
    return {"mechanism": first["mechanism"], "name": name, "options": options, **origin(rows)}


def origin(rows: Sequence[Row]) -> dict[str, Any]:
    """Where rows come from: device, versions, commits, dates, seeds."""

    def every(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows if row.get(name)}))

    return {
        "seeds": sorted({row["seed"] for row in rows}),
        "device": every("device"),
        "versions": {name: every(name) for name in ("torch", "triton", "transformers")},
        "commit": every("commit"),
        "date": every("date"),
    }


def origin_text(rows: Sequence[Row]) -> str:
    """Say in a line where rows come from."""
    facts = origin(rows)
    dates = sorted({row["date"][:10] for row in rows if row.get("date")})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    torch = facts["versions"]["torch"]
    seeds = ", ".join(map(str, facts["seeds"]))
    return f"{facts['device']}, torch {torch}, commit {facts['commit']}, {days}, seeds {seeds}"
