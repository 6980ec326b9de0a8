"""What a conversion gains in time and memory: at its own length, and from which length on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lln.report.numbers import three_digits

Found = Mapping[str, Any]
MB = 2**20
NOT_MEASURED = "Time and memory were not measured."


def gain_words(found: Found) -> str:
    """Time and memory beside softmax in sentences, for the head of the report and the terminal.

    Args:
        found: What conversion.json holds; ``positions`` are those that the model has, None where
            they do not end.
    """
    forward = found["forward_cost"]
    if not forward:
        return NOT_MEASURED
    row = _at(forward, "N", found["length"])
    ratios = [f"{row['ratio']:.2f} × the time"]
    if (memory := _ratio(row, "mb")) is not None:
        ratios.append(f"{memory:.2f} × the memory")
    said = [f"A forward pass over {row['N']:,} tokens takes {' and '.join(ratios)} of softmax."]
    times = [(each["N"], each["ratio"]) for each in forward]
    memories = [(each["N"], _ratio(each, "mb")) for each in forward]
    known = [(length, ratio) for length, ratio in memories if ratio is not None]
    for what, points in (("time", times), ("memory", known)):
        if points:
            said.append(_crossing(what, points, found["positions"]))
    if found["decode_cost"]:
        row = _at(found["decode_cost"], "context", found["length"])
        said.append(
            f"After {row['context']:,} tokens the next one takes {row['ratio']:.2f} × the time, "
            f"and the cache has {row['student_cache'] / row['teacher_cache']:.2f} × the size."
        )
    return " ".join(said)


def gain_lines(found: Found) -> list[list[str]]:
    """What was measured at the length of the conversion: a title, of softmax, of the new model."""
    lines = []
    if found["forward_cost"]:
        row = _at(found["forward_cost"], "N", found["length"])
        lines.append([f"forward pass of {row['N']:,} tokens, ms", *_both(row, "ms")])
        if _ratio(row, "mb") is not None:
            lines.append(["its memory, MiB", *_both(row, "mb")])
    if found["decode_cost"]:
        row = _at(found["decode_cost"], "context", found["length"])
        lines.append([f"a token after {row['context']:,}, ms", *_both(row, "ms")])
        lines.append(["cache then, MiB", *_both(row, "cache", MB)])
    return lines


def _at(rows: Sequence[Found], name: str, length: int) -> Found:
    """The longest that was measured up to a length, else the shortest."""
    return max((row for row in rows if row[name] <= length), key=lambda r: r[name], default=rows[0])


def _ratio(row: Found, unit: str) -> float | None:
    """Converted over softmax; None where one was too little to be noticed, or is not known."""
    own, softmax = row.get(f"student_{unit}") or 0, row.get(f"teacher_{unit}") or 0
    return own / softmax if own > 0 and softmax > 0 else None


def _both(row: Found, unit: str, per: float = 1.0) -> list[str]:
    return [three_digits(row[f"{who}_{unit}"] / per) for who in ("teacher", "student")]


def _crossing(what: str, points: Sequence[tuple[int, float]], positions: int | None) -> str:
    """Say from which length on the converted model needs less, to the longest measured."""
    above = [length for length, ratio in points if ratio >= 1]
    last = points[-1][0]
    if not above:
        return f"It needs less {what} at all lengths measured, {points[0][0]:,} to {last:,} tokens."
    within = "" if positions is None else f" (the model has {positions:,} positions)"
    if above[-1] == last:
        return f"It does not need less {what} at any length up to {last:,} tokens{within}."
    first = next(length for length, _ in points if length > above[-1])
    beyond = positions is not None and first > positions
    end = f", beyond the model's {positions:,} positions: within them nothing is gained"
    return (
        f"In {what} the curves cross between {above[-1]:,} and {first:,} tokens"
        f"{end if beyond else ''}."
    )
