"""What a conversion itself has told, as conversion.json holds it, beside what the judge finds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lln.conversion.judge import Judge
from lln.conversion.settings import CALIBRATION, Settings
from lln.conversion.subject import Subject
from lln.conversion.unfinished import Unfinished
from lln.hf.conversion.cache_size import cache_share
from lln.hf.conversion.convert import Conversion
from lln.ops.window.near import Near
from lln.records.rows import thinned

Row = dict[str, Any]
CONTEXTS = 8192, 65_536  # tokens at which the size of the cache is told
CURVE_POINTS = 400


def findings(
    settings: Settings, subject: Subject, judge: Judge, done: Conversion, unfinished: Unfinished
) -> Row:
    """Settings, stages and curves, and what keeps softmax."""
    stages = [{**row, "seconds": unfinished.seconds.get(row["stage"], row["seconds"])}
              for row in done.stages]  # fmt: skip
    if judge.kind == "decoder":
        for row in stages:
            row["teacher_perplexity"] = stages[0].get("perplexity")
    length = subject.length(settings.length)
    steps = CALIBRATION + settings.transfer_steps + settings.recover_steps
    return {
        "model": subject.name,
        "auto_class": subject.auto_class,
        "kind": judge.kind,
        "attention": settings.attention,
        "options": {k: v for k, v in _plain(done.options).items() if _is_json(v)},
        "near_keys": near_keys(done.options, causal=judge.kind == "decoder"),
        "layers": len(done.errors["calibrate"]),
        "kept": done.kept,
        "kept_heads": {str(layer): list(heads) for layer, heads in done.kept_heads.items()},
        "kept_key_heads": {str(layer): heads for layer, heads in done.kept_key_heads.items()},
        "key_heads": done.key_heads,
        "cache_share": _cache_share(done) if judge.kind == "decoder" else {},
        "scores": {order: _by_layer(found) for order, found in done.scores.items()},
        "length": length,
        "positions": subject.longest if subject.table else None,
        "batch_size": settings.batch_size,
        "transfer_steps": settings.transfer_steps,
        "recover_steps": settings.recover_steps,
        "tokens": steps * settings.batch_size * length,
        "precision": settings.precision,
        "seed": settings.seed,
        "stages": stages,
        "agreement": judge.agreement(stages[-1]),
        "layer_errors": {
            name: [found[layer] for layer in sorted(found)] for name, found in done.errors.items()
        },
        "curves": {name: curve(rows) for name, rows in done.curves.items()},
        "settings": settings.decisive(),
        **({"from_scratch": True} if settings.from_scratch else {}),
    }


def _cache_share(done: Conversion) -> dict[str, float]:
    """Size of the cache beside softmax's, by the number of tokens."""
    kept = sum(map(len, done.kept_key_heads.values()))
    sizes = {"key_heads": done.key_heads, "kept": kept}
    return {f"{n}": cache_share(done.model, **sizes, context=n) for n in CONTEXTS}


def _by_layer(scores: Mapping[int, Sequence[float]]) -> list[list[float]]:
    """Scores of key heads in the order of the layers, to the digits that matter."""
    return [[round(value, 5) for value in scores[layer]] for layer in sorted(scores)]


def near_keys(options: Mapping[str, Any], *, causal: bool) -> int | None:
    """Most near keys of a query; None for another attention."""
    near = Near.read(options.get("near"))
    return None if near is None else near.keys(causal)


def curve(rows: Iterable[Row]) -> list[Row]:
    """Error or loss by update, a mean over layers, at most some hundred points."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row["error"] if "error" in row else row["loss"])
    points = [{"step": step, "value": sum(values) / len(values)} for step, values in found.items()]
    return thinned(points, CURVE_POINTS)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to_json() if isinstance(v, Near) else v for k, v in options.items()}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
