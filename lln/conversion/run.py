"""``lln convert``: load, tell the cost, convert, judge, save with a report."""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lln.hf
from lln.conversion import page
from lln.conversion.cost import decode_cost, forward_cost
from lln.conversion.estimate import cost_seconds, seconds_since_start, try_out
from lln.conversion.findings import findings
from lln.conversion.judge import Judge, judge_of
from lln.conversion.row import row_of
from lln.conversion.settings import CALIBRATION, Settings
from lln.conversion.subject import (
    OnDevice,
    Subject,
    copy_beside,
    drawn_anew,
    find_texts,
    load_subject,
    training_batches,
)
from lln.conversion.told import Told, duration
from lln.conversion.unfinished import (
    Unfinished,
    digest,
    digest_of_weights,
    without_nan,
)
from lln.hf.conversion.convert import Conversion
from lln.inspect.model import quiet
from lln.records import files, machine
from lln.records.rows import append_row
from lln.report.page import render

Row = dict[str, Any]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
SHORTEST, LONGEST_ON_CPU, LONGEST_ON_GPU = 128, 4096, 32768  # tokens at which cost is measured
DEVICES = re.compile(r"cpu|cuda(:\d+)?")
NOT_JUDGED: Row = {"branches": {}, "near_shares": []}
NOT_TIMED: Row = {"forward_cost": [], "decode_cost": []}


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
    loading = seconds_since_start()
    texts = find_texts(settings.data, settings.held_out)
    if texts.train is None:
        say(
            f"without --data it learns from {texts.corpus}, to try it out; text like that which "
            "the model will read makes a better one"
        )
    length = subject.length(settings.length)
    sizes = {"length": length, "batch_size": settings.batch_size}
    judge = judge_of(subject, texts, **sizes, articles=settings.judge_articles)
    updates = CALIBRATION + settings.transfer_steps + settings.recover_steps
    lessons = training_batches(subject, texts, **sizes, updates=updates, seed=settings.seed)
    read = [*lessons.batches.sequences, *lessons.apart.sequences, *judge.sequences]
    contents = {
        "digest of the files of the model": digest_of_weights(settings.model),
        "digest of the text": digest(ids.tobytes() for ids in read),
    }
    unfinished = Unfinished(settings.out, {**settings.decisive(), **contents})
    with unfinished.held():
        on_device, apart = (OnDevice(x, device) for x in (lessons.batches, lessons.apart))
        _tell(settings, subject, judge, on_device, length, say)
        if unfinished.resumed:
            say("goes on where it was interrupted")
        else:
            say("trying out a few updates, to tell how long it will take")
            say(_estimate(settings, subject, judge, on_device, length, loading))
        attempts = Attempts(say)
        done = _convert(settings, judge, on_device, apart, subject, unfinished, attempts)
        with unfinished.published() as folder:
            _save(folder, done.model, subject, settings)
            found = findings(settings, subject, judge, done, unfinished)
            found |= {"corpus": texts.corpus, "text": texts.words}
            say("judging: branches alone, shares of heads, and what the teacher is asked too")
            found |= attempts("judging", lambda: judge.finish(done.model), NOT_JUDGED)
            costs = functools.partial(_costs, settings, subject, judge, done.model, say)
            found |= attempts("measuring time and memory", costs, NOT_TIMED)
            found |= {"notes": [*judge.notes, *attempts.failures], **_origin(device)}
            found["seconds"] = round(time.perf_counter() - started, 1)
            found = without_nan(found)
            _write(folder, found)
    if settings.results is not None and attempts.failures:
        say("no result row was written, for not all of it was measured")
    elif settings.results is not None:
        append_row(settings.results / "conversion.jsonl", row_of(found))
    return found


@dataclass
class Attempts:
    """Measurements that may fail: a conversion is worth more than what is said of it."""

    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def __call__(self, what: str, measure: Callable[[], Row], otherwise: Row) -> Row:
        """What ``measure`` finds; after an error, which is told, ``otherwise``."""
        try:
            return measure()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.failures.append(f"{what} failed, the model is converted all the same: {reason}")
            self.say(self.failures[-1])
            return otherwise


def _device(settings: Settings) -> str:
    if settings.precision not in PRECISIONS:
        raise ValueError(f"--precision {settings.precision} is unknown; choose fp32 or bf16")
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not DEVICES.fullmatch(device):
        raise ValueError(f"--device {device} is unknown; choose cpu, cuda, or one such as cuda:0")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device here; choose cpu")
    return device


def _tell(
    settings: Settings,
    subject: Subject,
    judge: Judge,
    batches: OnDevice,
    length: int,
    say: Callable[[str], None],
) -> None:
    """Say what will be done."""
    used = (CALIBRATION + settings.transfer_steps + settings.recover_steps) * settings.batch_size
    again = len(batches.batches.sequences)
    epochs = f", {used / again:.1f} times the text" if again < used else ""
    anew = ", drawn anew" if settings.from_scratch else ""
    say(
        f"{subject.name} ({type(subject.model).__name__}, "
        f"{subject.model.num_parameters():,} parameters{anew}): {settings.transfer_steps:,} "
        f"updates of transfer and {settings.recover_steps:,} of recovery, "
        f"{used * length:,} tokens{epochs}"
    )
    for note in judge.notes:
        say(note)


def _estimate(
    settings: Settings,
    subject: Subject,
    judge: Judge,
    batches: OnDevice,
    length: int,
    loading: float,
) -> str:
    """Say about how long everything takes, part by part."""
    pace = try_out(_start(settings, subject), batches, _arguments(settings, judge))
    tokens = settings.batch_size * length
    steps = {"transfer_steps": settings.transfer_steps, "recover_steps": settings.recover_steps}
    stages = 1 + sum(map(bool, (*steps.values(), settings.keep)))
    softmax, converted = judge.work(stages)
    parts = {
        "to learn": pace.learning(batches=CALIBRATION, **steps),
        "to judge": (softmax * pace.softmax + converted * pace.converted) / tokens,
        "to measure time and memory": cost_seconds(
            pace,
            subject.model,
            _cost_lengths(settings, subject),
            tokens=tokens,
            length=length,
            loading=loading,
        ),
    }
    said = ", ".join(f"{duration(seconds)} {what}" for what, seconds in parts.items())
    return f"about {duration(sum(parts.values()))} on this machine: {said}"


def _start(settings: Settings, subject: Subject) -> Any:
    """The model whose attention is exchanged."""
    return drawn_anew(subject.model) if settings.from_scratch else subject.model


def _arguments(settings: Settings, judge: Judge) -> Row:
    """What :func:`lln.hf.convert` is asked for, but for model, batches and progress."""
    precision = PRECISIONS[settings.precision]
    scratch = settings.from_scratch
    recover_options = {"seed": settings.seed, "precision": precision, **settings.recover_options}
    return {
        "teacher": judge.teacher if scratch else None,
        "attention": settings.attention,
        "options": settings.options,
        "calibration": CALIBRATION,
        "transfer_steps": settings.transfer_steps,
        "transfer_options": {
            "seed": settings.seed,
            "precision": precision,
            **settings.transfer_options,
        },
        "keep": settings.keep,
        "keep_by": settings.keep_by,
        "recover_steps": settings.recover_steps,
        "recover_options": {"embeddings": True, **recover_options} if scratch else recover_options,
    }


def _convert(
    settings: Settings,
    judge: Judge,
    batches: OnDevice,
    apart: OnDevice,
    subject: Subject,
    unfinished: Unfinished,
    attempts: Attempts,
) -> Conversion:
    told = Told()

    def measure(model: Any) -> Row:
        if not getattr(model.config, "lln", None):
            return judge.measure(model)  # before any work: nothing is lost
        return attempts("judging a stage", lambda: judge.measure(model), {})

    def progress(stage: str, step: int, total: int, value: float) -> None:
        unfinished.took(stage, step, total)
        told(stage, step, total, value)

    torch.manual_seed(settings.seed)
    try:
        return lln.hf.convert(
            _start(settings, subject),
            batches,
            **_arguments(settings, judge),
            held_out=apart,
            folder=unfinished.folder,
            measure=unfinished.once(measure),
            progress=progress,
        )
    finally:
        told.stop()


def _cost_lengths(settings: Settings, subject: Subject) -> list[int]:
    """Numbers of tokens at which time and memory are measured."""
    usual = LONGEST_ON_GPU if subject.model.device.type == "cuda" else LONGEST_ON_CPU
    most = usual if settings.cost_length is None else settings.cost_length
    if subject.kind == "decoder" and subject.table and subject.longest is not None:
        most = min(most, subject.longest)
    first = min(SHORTEST, most)
    return [first << power for power in range(32) if first and first << power <= most]


def _costs(
    settings: Settings, subject: Subject, judge: Judge, student: Any, say: Callable[[str], None]
) -> Row:
    """Time and memory of both against the number of tokens."""
    lengths = _cost_lengths(settings, subject)
    if not lengths:
        return dict(NOT_TIMED)
    say(f"measuring time and memory at {lengths[0]:,} to {lengths[-1]:,} tokens")
    found: Row = {
        "forward_cost": forward_cost(judge.teacher, student, lengths, label="forward pass"),
        "decode_cost": [],
    }
    if judge.kind == "decoder":
        most = subject.longest if subject.table else None
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


def _save(folder: Path, model: Any, subject: Subject, settings: Settings) -> None:
    """Write the model, its tokenizer, and what stood beside the softmax model."""
    import transformers

    copy_beside(settings.model, folder, leave_out=settings.out)
    with quiet(transformers):
        model.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            files.let_others_read(weights)
        subject.tokenizer.save_pretrained(folder)


def _write(folder: Path, found: Row) -> None:
    """Write what was measured."""
    files.write_text(folder / "conversion.json", json.dumps(found, indent=1, allow_nan=False))
    files.write_text(folder / "report.html", render(page.build(found)))


def met(found: Mapping[str, Any], required: float | None) -> bool:
    """Whether a conversion agrees with its teacher as well as ``--require`` wants."""
    return required is None or (
        found["agreement"] is not None
        and math.isfinite(found["agreement"])
        and found["agreement"] >= required
    )
