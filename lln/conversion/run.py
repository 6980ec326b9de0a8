"""``lln convert``: load, tell the cost, convert, judge, save with a report."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import lln.hf
from lln.conversion import page
from lln.conversion.cost import decode_cost, forward_cost
from lln.conversion.judge import Judge, judge_of
from lln.conversion.settings import Settings
from lln.conversion.subject import (
    OnDevice,
    Subject,
    drawn_anew,
    find_texts,
    load_subject,
    training_batches,
)
from lln.conversion.told import Told, duration
from lln.conversion.unfinished import Unfinished
from lln.hf.conversion.convert import Conversion
from lln.inspect.model import quiet
from lln.records import files, machine
from lln.records.rows import append_row, number, thinned
from lln.report.page import render

Row = dict[str, Any]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
CALIBRATION = 4  # batches from which α, β and γ are measured
# Time of an update in forward passes of its batch, roughly: for what is told before the start.
TRANSFER_PASSES, RECOVER_PASSES = 2.0, 5.0
SHORTEST, LONGEST_ON_CPU, LONGEST_ON_GPU = 128, 4096, 32768  # tokens at which cost is measured
CURVE_POINTS = 400


def convert_and_judge(settings: Settings, say: Callable[[str], None] = print) -> Row:
    """Convert a model, judge it beside its teacher, and save both findings and model.

    The folder ``settings.out`` gets the model with its tokenizer, conversion.json (everything that
    was measured) and report.html. It appears as a whole; until then progress lies in its folder
    ``.progress``, and the same call goes on after a kill.

    Args:
        say: Prints a line.

    Returns:
        What conversion.json holds; ``agreement`` is 1 for a student as good as its teacher.

    Raises:
        ValueError: A setting, the model or the text cannot be used; the message says why.
    """
    started = time.perf_counter()
    device = _device(settings)
    subject = load_subject(settings.model, device)
    texts = find_texts(settings.data, settings.held_out)
    length = subject.length(settings.length)
    unfinished = Unfinished(settings.out, settings.decisive())
    with unfinished.held():
        sizes = {"length": length, "batch_size": settings.batch_size}
        judge = judge_of(subject, texts, **sizes, articles=settings.judge_articles)
        updates = CALIBRATION + settings.transfer_steps + settings.recover_steps
        lessons = training_batches(subject, texts, **sizes, updates=updates, seed=settings.seed)
        on_device, apart = (OnDevice(x, device) for x in (lessons.batches, lessons.apart))
        _tell(settings, subject, judge, on_device, length, unfinished.resumed, say)
        done = _convert(settings, judge, on_device, apart, subject, unfinished)
        found = _findings(settings, subject, judge, done, unfinished)
        found |= {"corpus": texts.corpus, "text": texts.words}
        say("judging: branches alone, shares of heads, and what the teacher is asked too")
        found |= judge.finish(done.model)
        found |= _costs(settings, subject, judge, done.model, say)
        found |= {"notes": judge.notes, **_origin(device)}
        found["seconds"] = round(time.perf_counter() - started, 1)
        found = _clean(found)
        unfinished.publish(lambda folder: _write(folder, found, done.model, subject))
    if settings.results is not None:
        append_row(settings.results / "conversion.jsonl", row_of(found))
    return found


def _device(settings: Settings) -> str:
    if settings.precision not in PRECISIONS:
        raise ValueError(f"--precision {settings.precision} is unknown; choose fp32 or bf16")
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device here; choose cpu")
    return device


@torch.no_grad()
def _tell(
    settings: Settings,
    subject: Subject,
    judge: Judge,
    batches: OnDevice,
    length: int,
    resumed: bool,
    say: Callable[[str], None],
) -> None:
    """Say what will be done and how long it takes, by one timed forward pass."""
    subject.model(**batches[0])
    start = time.perf_counter()
    subject.model(**batches[0])
    if batches.device.startswith("cuda"):
        torch.cuda.synchronize()
    forward = time.perf_counter() - start
    tokens = settings.batch_size * length
    learning = forward * (
        TRANSFER_PASSES * settings.transfer_steps + RECOVER_PASSES * settings.recover_steps
    )
    judging = forward * judge.tokens / tokens * 12
    used = (CALIBRATION + settings.transfer_steps + settings.recover_steps) * settings.batch_size
    again = len(batches.batches.sequences)
    epochs = f", {used / again:.1f} times the text" if again < used else ""
    anew = ", drawn anew" if settings.from_scratch else ""
    say(
        f"{subject.name} ({type(subject.model).__name__}, "
        f"{subject.model.num_parameters():,} parameters{anew}): {settings.transfer_steps:,} "
        f"updates of transfer and {settings.recover_steps:,} of recovery, "
        f"{used * length:,} tokens{epochs}; "
        f"about {duration(learning)} on this machine, and {duration(judging)} to judge"
        + ("; goes on where it was interrupted" if resumed else "")
    )
    for note in judge.notes:
        say(note)


def _convert(
    settings: Settings,
    judge: Judge,
    batches: OnDevice,
    apart: OnDevice,
    subject: Subject,
    unfinished: Unfinished,
) -> Conversion:
    told = Told()

    def progress(stage: str, step: int, total: int, value: float) -> None:
        unfinished.took(stage, step, total)
        told(stage, step, total, value)

    precision = PRECISIONS[settings.precision]
    torch.manual_seed(settings.seed)
    scratch = settings.from_scratch
    recover_options = {"precision": precision, **settings.recover_options}
    try:
        return lln.hf.convert(
            drawn_anew(subject.model) if scratch else subject.model,
            batches,
            teacher=judge.teacher if scratch else None,
            attention=settings.attention,
            options=settings.options,
            calibration=CALIBRATION,
            transfer_steps=settings.transfer_steps,
            transfer_options={
                "seed": settings.seed,
                "precision": precision,
                **settings.transfer_options,
            },
            keep=settings.keep,
            keep_heads=settings.keep_heads,
            budget=settings.budget,
            recover_steps=settings.recover_steps,
            recover_options={"embeddings": True, **recover_options} if scratch else recover_options,
            held_out=apart,
            folder=unfinished.folder,
            measure=unfinished.once(judge.measure),
            progress=progress,
        )
    finally:
        told.stop()


def _findings(
    settings: Settings, subject: Subject, judge: Judge, done: Conversion, unfinished: Unfinished
) -> Row:
    """What the conversion itself has told."""
    stages = [{**row, "seconds": unfinished.seconds.get(row["stage"], row["seconds"])}
              for row in done.stages]  # fmt: skip
    if judge.kind == "decoder":
        for row in stages:
            row["teacher_perplexity"] = stages[0]["perplexity"]
    length = subject.length(settings.length)
    steps = CALIBRATION + settings.transfer_steps + settings.recover_steps
    return {
        "model": subject.name,
        "auto_class": subject.auto_class,
        "kind": judge.kind,
        "attention": settings.attention,
        "options": {k: v for k, v in done.options.items() if _is_json(v)},
        "near_keys": near_keys(done.options, causal=judge.kind == "decoder"),
        "layers": len(done.errors["calibrate"]),
        "kept": done.kept,
        "kept_heads": {str(layer): list(heads) for layer, heads in done.kept_heads.items()},
        "length": length,
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


def near_keys(options: Mapping[str, Any], *, causal: bool) -> int | None:
    """Most near keys of a query: block, overlaps and sinks; None for another attention."""
    block = options.get("diag_block")
    if block is None:
        return None
    overlap = options.get("diag_overlap", 0) * (1 if causal else 2)
    return block + overlap + options.get("sinks", 0)


def curve(rows: Iterable[Row]) -> list[Row]:
    """Error or loss by update, a mean over layers, at most some hundred points."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row["error"] if "error" in row else row["loss"])
    points = [{"step": step, "value": sum(values) / len(values)} for step, values in found.items()]
    return thinned(points, CURVE_POINTS)


def _costs(
    settings: Settings, subject: Subject, judge: Judge, student: Any, say: Callable[[str], None]
) -> Row:
    """Time and memory of both against the number of tokens."""
    usual = LONGEST_ON_GPU if student.device.type == "cuda" else LONGEST_ON_CPU
    most = usual if settings.cost_length is None else settings.cost_length
    if judge.kind == "decoder" and subject.table and subject.longest is not None:
        most = min(most, subject.longest)
    first = min(SHORTEST, most)
    lengths = [first << power for power in range(32) if first and first << power <= most]
    if not lengths:
        return {"forward_cost": [], "decode_cost": []}
    say(f"measuring time and memory at {lengths[0]:,} to {lengths[-1]:,} tokens")
    found: Row = {
        "forward_cost": forward_cost(judge.teacher, student, lengths, label="forward pass"),
        "decode_cost": [],
    }
    if judge.kind == "decoder":
        contexts = [max(1, each - 32) if each == most else each for each in lengths]
        found["decode_cost"] = decode_cost(judge.teacher, student, contexts, label="decoding")
    return found


def _origin(device: str) -> Row:
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        **machine.facts(device),
        "transformers": machine.version("transformers"),
        "date": now.isoformat(timespec="seconds"),
    }


def _write(folder: Path, found: Row, model: Any, subject: Subject) -> None:
    """Fill the folder of the result."""
    import transformers

    with quiet(transformers):
        model.save_pretrained(folder)
        subject.tokenizer.save_pretrained(folder)
    files.write_text(folder / "conversion.json", json.dumps(found, indent=1, allow_nan=False))
    files.write_text(folder / "report.html", render(page.build(found)))


def row_of(found: Mapping[str, Any]) -> Row:
    """A row of ``results/conversion.jsonl``: what was measured, without curves and texts."""
    configuration = {**found["settings"], "options": found["options"], "length": found["length"]}
    configuration |= {"model": found["model"], "data": found["corpus"]}  # wherever they lay
    if configuration["held_out"]:
        configuration["held_out"] = Path(configuration["held_out"]).name
    seed = configuration.pop("seed")
    text = json.dumps(configuration, sort_keys=True)
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
        "digest": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _clean(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(each) for each in value]
    if isinstance(value, float):
        return number(value)
    return value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def met(found: Mapping[str, Any], required: float | None) -> bool:
    """Whether a conversion agrees with its teacher as well as ``--require`` wants."""
    return required is None or (
        found["agreement"] is not None
        and math.isfinite(found["agreement"])
        and found["agreement"] >= required
    )
