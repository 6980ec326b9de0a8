"""What is said of time and memory: sizes are exact, peaks are those of the matrices, turns are."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import lln.hf
from lln.conversion import cost, gain
from tests.hf.tiny import make, text

WIDE = {"hidden_size": 64, "max_position_embeddings": 64}


def converted(model, **options):
    student = copy.deepcopy(model)
    near_far = {"near": lln.Near(8, overlap=8, sinks=2), "statistics": "fixed", **options}
    lln.hf.replace(student, "lln_nearfar", quiet=True, **near_far)
    lln.hf.calibrate(student, [{"input_ids": text(2, 40)}], method="entropy")
    return student


@pytest.mark.slow
def test_peak_memory_is_that_of_the_matrix():
    """Softmax by its N × N matrix: 4 heads of float32, and what it is made of."""
    teacher = make("bert", head="AutoModel", **WIDE)
    student = converted(teacher)
    teacher.set_attn_implementation("eager")
    rows = cost.forward_cost(teacher, student, [256, 2048], min_seconds=0.0)
    assert [row["N"] for row in rows] == [256, 2048]
    if rows[0]["teacher_mb"] is None:
        pytest.skip("no /proc/self/clear_refs: peaks are measured on Linux alone")
    matrix = 4 * 2048**2 * 4 / 2**20
    assert matrix <= rows[1]["teacher_mb"] < 6 * matrix
    assert rows[1]["student_mb"] < matrix / 2
    assert rows[1]["teacher_mb"] > 8 * rows[0]["teacher_mb"]


@pytest.mark.gpu
def test_peaks_on_a_gpu():
    """The same of torch's allocator; times are those of finished work."""
    teacher = make("bert", head="AutoModel", **WIDE)
    student = converted(teacher).cuda()
    teacher.set_attn_implementation("eager")
    [row] = cost.forward_cost(teacher.cuda(), student, [2048], min_seconds=0.0)
    matrix = 4 * 2048**2 * 4 / 2**20
    assert matrix <= row["teacher_mb"] < 6 * matrix and 0 < row["student_mb"] < matrix / 2
    decoder = make("llama")
    [row] = cost.decode_cost(decoder.cuda(), converted(make("llama")).cuda(), [96], new_tokens=3)
    assert row["device"] == "cuda:0" and row["student_cache"] < row["teacher_cache"]


def test_a_row_per_length():
    """Beyond the positions that an encoder has, too, and of a decoder."""
    for family, head in (("bert", "AutoModel"), ("roberta", None), ("llama", None)):
        teacher = make(family, head=head)
        options = {"min_seconds": 0.0, "with_memory": False, "batch_size": 2}
        rows = cost.forward_cost(teacher, converted(teacher), [16, 200], **options)
        assert [(row["N"], row["batch_size"], row["device"]) for row in rows] == [
            *((16, 2, "cpu"), (200, 2, "cpu")),
        ]
        assert all(row["teacher_ms"] > 0 and row["student_ms"] > 0 for row in rows)


def test_the_cache_of_softmax_grows_and_the_state_does_not():
    teacher = make("llama")
    rows = cost.decode_cost(teacher, converted(teacher), [32, 96], new_tokens=3, chunk=20)
    keys_and_values = 2 * 2 * 2 * 8 * 4  # layers, key heads, width, bytes
    assert [row["teacher_cache"] for row in rows] == [32 * keys_and_values, 96 * keys_and_values]
    assert rows[0]["student_cache"] == rows[1]["student_cache"] > 0
    assert [row["context"] for row in rows] == [32, 96]


def test_a_cache_is_counted_whole():
    """Ring, sinks, states and positions of every layer."""
    model = converted(make("llama"))
    cache = cost.filled_cache(model, text(1, 50), 16)
    assert all(isinstance(layer, lln.hf.StateLayer) for layer in cache.layers)
    parts = [layer.memory.position for layer in cache.layers]
    parts += [x for layer in cache.layers for x in layer.memory.tensors.values()]
    assert cost.cache_bytes(cache.layers) == sum(x.numel() * x.element_size() for x in parts)


def test_the_state_has_read_what_the_keys_have():
    """The next token's logits after a context in chunks are those of one pass."""
    for model in (make("llama"), converted(make("llama"))):
        ids = text(1, 50)
        cache = cost.filled_cache(model, ids[:, :-1], 16)
        with torch.no_grad():
            got = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
            expected = model(ids, use_cache=False).logits[:, -1]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def costs(ratios, memories=(), **more):
    """What conversion.json holds of time and memory at 128, 256, 512 … tokens."""
    pairs = itertools.zip_longest(ratios, memories)
    rows = [
        {"N": 128 << i, "ratio": ratio, "teacher_ms": 10.0, "student_ms": 10.0 * ratio}
        | ({} if memory is None else {"teacher_mb": 2.0, "student_mb": 2.0 * memory})
        for i, (ratio, memory) in enumerate(pairs)
    ]
    return {"forward_cost": rows, "decode_cost": [], "length": 512, "positions": None, **more}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (costs([]), ["Time and memory were not measured."]),
        (
            costs([1.8, 1.7, 1.5, 1.2, 0.8], [1, 1, 1, 2, 2], positions=512),
            [
                "over 512 tokens takes 1.50 × the time and 1.00 × the memory of softmax.",
                "In time the curves cross between 1,024 and 2,048 tokens, beyond the model's 512 "
                "positions: within them nothing is gained.",
                "It does not need less memory at any length up to 2,048 tokens (the model has 512",
            ],
        ),
        (
            costs([1.8, 0.9, 1.1, 0.7], positions=2048),  # one dip before it is no crossing
            ["In time the curves cross between 512 and 1,024 tokens."],
        ),
        (costs([0.9, 0.7]), ["needs less time at all lengths measured, 128 to 256 tokens."]),
    ],
)
def test_it_is_said_where_the_curves_cross(found, said):
    words = gain.gain_words(found)
    assert [each for each in said if each not in words] == [], words


def test_what_it_costs_stands_beside_softmax():
    decode = {"context": 480, "ratio": 0.5, "teacher_ms": 8.0, "student_ms": 4.0}
    decode |= {"teacher_cache": 2**21, "student_cache": 2**20}
    found = costs([1.8, 1.7, 1.5], [1, 1, 3], decode_cost=[decode])
    assert gain.gain_lines(found) == [
        ["forward pass of 512 tokens, ms", "10", "15"],
        ["its memory, MiB", "2", "6"],
        ["a token after 480, ms", "8", "4"],
        ["cache then, MiB", "2", "1"],
    ]
    assert "the next one takes 0.50 × the time, and the cache has 0.50 ×" in gain.gain_words(found)


def test_models_run_in_turns_and_the_first_turn_does_not_count(monkeypatch):
    calls, clock = [], [0.0]

    def run(name, seconds):
        calls.append(name)
        clock[0] += 100 if len(calls) <= 2 else seconds

    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])
    runs = {"teacher": lambda: run("teacher", 0.2), "student": lambda: run("student", 0.1)}
    found = cost._in_turns(runs, torch.device("cpu"), 1.4)
    assert calls == ["teacher", "student"] * 6
    expected = {"teacher_ms": 200, "student_ms": 100, "ratio": 0.5}
    assert found == {name: pytest.approx(value) for name, value in expected.items()}
