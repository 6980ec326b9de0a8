"""What the kernels were to reach on a GPU, and what the newest rows of ``lln bench gpu`` have.

Bars were set in advance, for an H200. One that is missed is said to be missed, one
without rows not to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, Row, latest, markdown_table, origin

# As rows have them.
FORWARD, TRAINING = "fwd", "fwd+bwd"
EAGER, HOST, GRAPH = "eager", "host", "graph"
TOKENS, WIDE_TOKENS = 65_536, 32_768  # of heads of 64 and of 128
LENGTHS = (512, 4096, 16_384)
LONG = (2048, 4096, 16_384, 65_536)
BOTH = (FORWARD, TRAINING)
CONTEXTS = (2048, 8192, 65_536)
STEP_TOKENS = 16_384
OURS = ("triton", "mixed")  # whichever takes the shape
AHEAD = 1.0  # their time ÷ ours must be above
CONSTANT = 1.1  # the longest time ÷ the shortest that still counts as one
FLA = {512: 0.49, 4096: 0.56}  # 1.3 × fla's ms when the bars were set, where a run has no fla
DISTURBED = 1.5  # a loop in Python that takes so many times as long elsewhere in a run


class Rows:
    """The rows of one run, by what they measure."""

    def __init__(self, rows: Sequence[Row]) -> None:
        keys = ("op", "impl", "pass", "B", "N", "D", "launch")
        self._found = {
            tuple(row[key] for key in keys): row for row in rows if row["dtype"] == "bfloat16"
        }

    def value(
        self, column: str, op: str, passes: str, N: int, *, impl: Sequence[str] = OURS,
        launch: str = GRAPH, D: int = 64, B: int | None = None,
    ) -> float | None:  # fmt: skip
        """A column of a case's row, None if it was not measured; without B all tokens are meant."""
        batch = B or (TOKENS if D == 64 else WIDE_TOKENS) // N
        for name in impl:
            row = self._found.get((op, name, passes, batch, N, D, launch))
            if row is not None and row["ms_p50"]:
                return row[column]
        return None

    def ms(self, op: str, passes: str, N: int, **case: Any) -> float | None:
        """Milliseconds, the median."""
        return self.value("ms_p50", op, passes, N, **case)

    def share(self, op: str, passes: str, N: int, **case: Any) -> float | None:
        """Share of the memory floor."""
        return self.value("floor_share", op, passes, N, **case)


@dataclass(frozen=True)
class Value:
    """A measured number and its limit, at most or at least; without a limit it is only shown."""

    label: str
    number: float | None
    limit: float | None
    kind: Callable[[float], str]
    at_most: bool = False
    above: bool = False  # the limit itself is not enough

    @property
    def is_missed(self) -> bool:
        if self.number is None or self.limit is None:
            return False
        if self.at_most:
            return self.number > self.limit
        return self.number <= self.limit if self.above else self.number < self.limit

    def shown(self) -> str:
        if self.number is None:
            return f"{self.label}: –"
        text = self.kind(self.number)
        return f"{self.label}: {f'**{text}**' if self.is_missed else text}"

    def wanted(self) -> str:
        """The limit, in words."""
        assert self.limit is not None
        bound = "at most" if self.at_most else "more than" if self.above else "at least"
        return f"{bound} {self.kind(self.limit)} was wanted"


@dataclass(frozen=True)
class Target:
    """What was to be reached, in words, and the values that decide."""

    words: str
    bar: str
    values: Sequence[Value]

    @property
    def verdict(self) -> str:
        judged = [value for value in self.values if value.limit is not None]
        known = [value for value in judged if value.number is not None]
        if not known:
            return "not measured"
        if any(value.is_missed for value in known):
            return "**missed**"
        return "met" if len(known) == len(judged) else "met where measured"

    def sentence(self) -> str:
        """What the numbers say, for a list below the table."""
        missed = [value for value in self.values if value.is_missed]
        unknown = [v.label for v in self.values if v.number is None and v.limit is not None]
        said = [f"Missed: {self.words}"] if missed else [f"Met: {self.words}"]
        for wanted in dict.fromkeys(value.wanted() for value in missed):
            said.append(_range([v for v in missed if v.wanted() == wanted]) + f", where {wanted}")
        slower = [v for v in self.values if v.limit is None and v.above and (v.number or 2) <= 1]
        if slower:
            said.append(f"without a bar, but not ahead: {_range(slower)}")
        if unknown:
            said.append(f"not measured: {', '.join(unknown)}")
        return "; ".join(said) + "."


def _range(values: Sequence[Value]) -> str:
    """Several numbers as one range, and what they belong to."""
    numbers = sorted(value.number for value in values if value.number is not None)
    ends = dict.fromkeys(values[0].kind(number) for number in (numbers[0], numbers[-1]))
    return f"{' to '.join(ends)} ({', '.join(value.label for value in values)})"


def ratio(number: float) -> str:
    return f"{number:.2f}×"


def percent(number: float) -> str:
    return f"{number:.1%}"


def milliseconds(number: float) -> str:
    return f"{three_digits(number)} ms" if number >= 0.1 else f"{number:.3f} ms"


def over(above: float | None, below: float | None) -> float | None:
    """A quotient of what was measured."""
    return None if above is None or not below else above / below


def targets(rows: Sequence[Row]) -> list[Target]:
    """All of them, from the rows of one run."""
    found = Rows(rows)
    return [target for make in TARGETS for target in make(found)]


def _python(rows: Rows) -> Iterator[Target]:
    def eager(n: int, impl: Sequence[str] = OURS, B: int | None = None) -> float | None:
        return rows.ms("bidirectional", TRAINING, n, impl=impl, launch=EAGER, B=B)

    values = [
        Value(f"N = {n:,}", over(eager(n), rows.ms("bidirectional", TRAINING, n)), 1.8, ratio,
              at_most=True)
        for n in (512, 2048, 4096, 16_384)
    ]  # fmt: skip
    cudnn = over(eager(512, ("cudnn",)), eager(512))
    values.append(Value("cuDNN ÷ LLN at 512", cudnn, AHEAD, ratio, above=True))
    yield Target(
        "LLN called from Python, forward and backward: its time ÷ that of its CUDA graph",
        "≤ 1.8×, and ahead of cuDNN at N = 512",
        values,
    )
    alone = {n: over(eager(n, ("cudnn",), 1), eager(n, B=1)) for n in (2048, 4096, 8192, 16_384)}
    yield Target(
        "batch 1, 12 heads, called from Python, forward and backward: cuDNN's time ÷ LLN's",
        "above 1× from N = 4,096 on",
        [
            Value(f"N = {n:,}", number, AHEAD if n >= 4096 else None, ratio, above=True)
            for n, number in alone.items()
        ],
    )


def _shares(
    rows: Rows, op: str, limits: tuple[float, float], lengths: Sequence[int], D: int = 64
) -> list[Value]:
    return [
        Value(f"N = {n:,} {passes}", rows.share(op, passes, n, D=D), limit, percent)
        for n in lengths
        for passes, limit in zip(BOTH, limits, strict=True)
        if limit
    ]


def _floors(rows: Rows) -> Iterator[Target]:
    where = "share of the memory floor"
    values = _shares(rows, "bidirectional", (0.82, 0.80), LONG)
    yield Target(f"LLN: {where}", "≥ 82 / 80 %", values)
    yield _measuring(rows)
    values = _shares(rows, "lln_diag", (0, 0.68), LENGTHS)
    yield Target(f"LLN+Diag, blocks of 64, fwd+bwd: {where}", "≥ 68 %", values)
    values = _shares(rows, "lln_diag_128", (0.60, 0.50), LENGTHS)
    yield Target(f"LLN+Diag, blocks of 128: {where}", "≥ 60 / 50 %", values)
    values = _shares(rows, "lln_diag_overlap", (0.42, 0.28), LENGTHS)
    yield Target(f"blocks of 128 that overlap by 64: {where}", "≥ 42 / 28 %", values)


def _measuring(rows: Rows) -> Target:
    values = []
    for passes in BOTH:
        for n in LENGTHS:
            with_, without = (
                rows.ms(op, passes, n, launch=HOST) for op in ("measured", "bidirectional")
            )
            added = None if with_ is None or without is None else with_ - without
            values.append(Value(f"N = {n:,} {passes}", added, 0.06, milliseconds, at_most=True))
    return Target("what measuring α and β adds on the host", "≤ 0.06 ms", values)


def _joint(rows: Rows) -> Iterator[Target]:
    recommended = {"": ("recommended", "recommended_average")}
    joint = {"blocks of 128, ": ("near_far", "lln_diag_128"), "blocks of 128 with overlap 64, ":
             ("near_far_overlap", "lln_diag_overlap")}  # fmt: skip
    names = "the recommended setting, its mix learned", "near and far under one normaliser"
    for name, pairs in zip(names, (recommended, joint), strict=True):
        values = [
            Value(
                f"{label}N = {n:,}",
                over(rows.ms(ours, TRAINING, n), rows.ms(average, TRAINING, n)),
                1.35, ratio, at_most=True,
            )
            for label, (ours, average) in pairs.items()
            for n in LENGTHS
        ]  # fmt: skip
        yield Target(f'{name}, fwd+bwd: its time ÷ that of mix="average"', "≤ 1.35×", values)


def _causal(rows: Rows) -> Iterator[Target]:
    values, fla = [], []
    for n in LENGTHS:
        theirs = rows.ms("causal", TRAINING, n, impl=("fla",))
        limit = 0.65 if n not in FLA else FLA[n] if theirs is None else 1.3 * theirs
        ours = rows.ms("causal", TRAINING, n)
        values.append(Value(f"N = {n:,}", ours, limit, milliseconds, at_most=True))
        fla.append(Value(f"fla at {n:,}", theirs, None, milliseconds))
    measured = any(value.number for value in fla)
    bar = "≤ 1.3 × fla as stored" if measured else "≤ 0.49 and 0.56 ms (1.3 × fla, an earlier run)"
    yield Target(
        "causal LLN, fwd+bwd", f"{bar} at 512 and 4,096; ≤ 0.65 ms at 16,384", values + fla
    )
    limits = zip(BOTH, (0.40, 1.20), strict=True)
    yield Target(
        "causal LLN+Diag, blocks of 64, N = 4,096",
        "≤ 0.40 / 1.20 ms",
        [
            Value(p, rows.ms("lln_diag_causal", p, 4096), limit, milliseconds, at_most=True)
            for p, limit in limits
        ],
    )


def _wide(rows: Rows) -> Iterator[Target]:
    bars = {
        "LLN": ("bidirectional", (0.62, 0.56)), "Diag 64": ("lln_diag", (0.58, 0.44)),
        "Diag 128": ("lln_diag_128", (0.40, 0.30)), "causal": ("causal", (0.25, 0.20)),
    }  # fmt: skip
    values = [
        Value(f"{label} {passes}", rows.share(op, passes, 4096, D=128), limit, percent)
        for label, (op, limits) in bars.items()
        for passes, limit in zip(BOTH, limits, strict=True)
    ]
    yield Target(
        "heads of 128, 32,768 tokens, N = 4,096: share of the memory floor",
        "LLN 62 / 56 %, Diag 64 58 / 44, Diag 128 40 / 30, causal 25 / 20",
        values,
    )


def _decoding(rows: Rows) -> Iterator[Target]:
    values = []
    for batch in (1, 64):
        ours = [rows.ms("decode", FORWARD, n, B=batch) for n in CONTEXTS]
        known = [ms for ms in ours if ms]
        spread = max(known) / min(known) if len(known) == len(CONTEXTS) else None
        label = f"batch {batch}, longest ÷ shortest"
        values.append(Value(label, spread, CONSTANT, ratio, at_most=True))
    for launch, words in ((GRAPH, "from a graph"), (EAGER, "from Python")):
        for batch in (1, 64):
            for n in CONTEXTS:
                theirs, ours = (
                    rows.ms("decode", FORWARD, n, impl=impl, launch=launch, B=batch)
                    for impl in (("sdpa",), OURS)
                )
                limit = AHEAD if batch == 64 and n >= 8192 else None
                label = f"SDPA ÷ ours {words} {batch} × {n:,}"
                values.append(Value(label, over(theirs, ours), limit, ratio, above=True))
    yield Target(
        "one step of decoding beside SDPA with its cache, after 2,048, 8,192 and 65,536 tokens",
        f"the same at all lengths (within {CONSTANT - 1:.0%}, from a graph); at batch 64 ahead "
        "from 8,192 on",
        values,
    )


def _training(rows: Rows) -> Iterator[Target]:
    values = []
    for n in (512, 1024, 2048, 4096):
        theirs, ours = (
            rows.ms("roberta_step", TRAINING, n, impl=(impl,), launch=EAGER, B=STEP_TOKENS // n)
            for impl in ("sdpa", "recommended")
        )
        limit = 1.2 if n == 4096 else 1.0
        values.append(Value(f"N = {n:,}", over(theirs, ours), limit, ratio))
    yield Target(
        "training step of RoBERTa-base called from Python, 16,384 tokens: SDPA's time ÷ that of "
        "the recommended setting",
        "≥ 1×, and 1.2× at N = 4,096",
        values,
    )


TARGETS = (_python, _floors, _joint, _causal, _wide, _decoding, _training)


def surroundings(rows: Sequence[Row]) -> str:
    """What calls from Python were disturbed by, in words; nothing where rows do not tell."""
    loops = [row["loop_ms"] for row in rows if row.get("loop_ms") and row["launch"] != GRAPH]
    others = [row["others_busy"] for row in rows if row.get("others_busy") is not None]
    if not loops or not others:
        return ""
    words = (
        f"While they were measured, other processes kept {sorted(others)[len(others) // 2]:.1f} "
        f"cores busy (median; {max(others):.1f} at most), and one loop in Python took "
        f"{min(loops):.2f} to {max(loops):.2f} ms."
    )
    is_steady = max(loops) <= DISTURBED * min(loops)
    return words + ("" if is_steady else " The host was disturbed: its times are upper limits.")


def gpu_targets(results: Path) -> str:
    """A line per target, its bar beside what was measured, and what the numbers say."""
    content = latest(results, "gpu")
    if content is None:
        return NOTHING_YET
    rows = content["rows"]
    found = targets(rows)
    lines = [[target.words, target.bar, _cell(target), target.verdict] for target in found]
    verdicts = [target.verdict for target in found]
    counts = {
        "met": verdicts.count("met"),
        "met as far as measured": verdicts.count("met where measured"),
        "missed": verdicts.count("**missed**"),
        "not measured": verdicts.count("not measured"),
    }
    summary = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    first = rows[0]
    words = (
        f"Of {len(found)} targets: {summary}. bfloat16, 12 heads of 64 and {TOKENS:,} tokens "
        "unless a line says otherwise; medians; fwd / fwd+bwd from CUDA graphs unless called from "
        "Python; "
        f"bold: misses its bar; –: not measured. {surroundings(rows)}".rstrip()
        + f" ({origin(first, rows)}, triton {first['triton']}, {content['date']})"
    )
    said = [f"- {t.sentence()}" for t in found if t.verdict != "not measured"]
    unknown = [target.words for target in found if target.verdict == "not measured"]
    if unknown:
        said.append(f"- Not measured: {'; '.join(unknown)}.")
    table = markdown_table(["target", "bar", "measured", "verdict"], lines)
    return f"{table}\n\n{words}\n\n" + "\n".join(said)


def _cell(target: Target) -> str:
    if all(value.number is None for value in target.values):
        return "–"
    return "; ".join(value.shown() for value in target.values)


BLOCKS: Blocks = {"gpu_targets": gpu_targets}
