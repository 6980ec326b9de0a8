"""Decoders beside their teacher: perplexity token by token, needles where they are said to be."""

from __future__ import annotations

import copy
import itertools
import math
import types

import pytest
import torch
from torch import nn

import lln.hf
from lln.conversion import decoders, needles
from lln.conversion.texts import token_ids
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.tiny import make, text

TOKENIZER = tokenizer_of(needles.NAMES, frame=False)
REAL = torch.from_numpy(next(token_ids(TOKENIZER, [article(400, 0)]))).long()


def one_loss(model, ids, begin: int, token: int) -> float:
    """−ln p of one token given those from ``begin`` on."""
    with torch.no_grad():
        logits = model(ids[None, begin:token]).logits[0, -1].double()
    return -logits.log_softmax(-1)[ids[token]].item()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_short_text_has_the_loss_of_the_model(family):
    model, ids = make(family), text(1, 40)[0]
    found = decoders.perplexity(model, ids, window=64, stride=32)
    with torch.no_grad():
        expected = model(ids[None], labels=ids[None]).loss.item()
    assert found["nll"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert found["tokens"] == 39


@pytest.mark.parametrize(("tokens", "together"), [(33, 1), (48, None), (61, 3), (61, 100)])
def test_strided_windows_score_every_token_once_with_its_context(tokens, together, monkeypatch):
    monkeypatch.setattr(decoders, "AT_ONCE", 7)
    model, ids, window, stride = make("llama"), text(1, tokens)[0], 16, 6
    begins = range(0, tokens, stride)
    total = sum(
        one_loss(model, ids, next(b for b in begins if b + window > token), token)
        for token in range(1, tokens)
    )
    options = {"window": window, "batch_size": together}
    found = decoders.perplexity(model, ids, stride=stride, **options)
    assert found["tokens"] == tokens - 1
    assert found["nll"] == pytest.approx(total / (tokens - 1), rel=1e-5)
    other = decoders.perplexity(model, ids, window=window, stride=window - 1)
    assert other["tokens"] == tokens - 1 and other["nll"] != pytest.approx(found["nll"], rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "window", "stride"), [(2, 4, 2), (4, 4, 2), (5, 4, 3), (103, 16, 5), (100, 16, 15)]
)
def test_windows_meet_without_overlap(tokens, window, stride):
    found = list(decoders.windows(tokens, window, stride))
    scored = [t for each in found for t in range(each.end - each.scored, each.end)]
    assert scored == list(range(1, tokens))
    for each in found[1:]:
        assert each.end - each.scored - each.begin >= window - stride
        assert each.end - each.begin <= window


def test_a_gpu_reads_many_short_windows_at_once():
    on_cpu, on_gpu = (types.SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda"))
    assert decoders.rows_at_once(on_cpu, 64) == 1
    found = [decoders.rows_at_once(on_gpu, length) for length in (2048, 8192, 1 << 20)]
    assert found == [4, 1, 1]


def test_a_stride_of_a_whole_window_is_refused():
    with pytest.raises(ValueError, match="stride=8 must be positive and less than window=8"):
        decoders.perplexity(make("llama"), text(1, 20)[0], window=8, stride=8)
    with pytest.raises(ValueError, match="has 1 tokens"):
        decoders.perplexity(make("llama"), text(1, 1)[0])


def test_positions_add_up_to_the_total():
    model, ids = make("llama"), text(1, 130)[0]
    rows = decoders.loss_by_position(model, ids, length=40, edges=[1, 2, 10, 40], batch_size=2)
    assert [(row["from"], row["to"], row["tokens"]) for row in rows] == [
        *((1, 1, 3), (2, 9, 24), (10, 39, 90)),
    ]
    total = sum(row["nll"] * row["tokens"] for row in rows)
    cut = ids[:120].view(3, 40)
    with torch.no_grad():
        assert total == pytest.approx(model(cut, labels=cut).loss.item() * 3 * 39, rel=1e-5)
    second = [[one_loss(model, line, 0, t) for t in range(2, 10)] for line in cut]
    means = torch.tensor(second).mean(1)
    assert rows[1]["nll"] == pytest.approx(means.mean().item(), rel=1e-4)
    assert rows[1]["se"] == pytest.approx((means.std() / 3**0.5).item(), rel=1e-3)


def test_bins_double_by_default():
    rows = decoders.loss_by_position(make("llama"), text(1, 100)[0], length=100)
    assert [(row["from"], row["to"]) for row in rows] == [(1, 31), (32, 63), (64, 99)]
    assert rows[0]["se"] is None
    with pytest.raises(ValueError, match=r"edges=\[1, 9\] must rise from 1 to length=20"):
        decoders.loss_by_position(make("llama"), text(1, 20)[0], length=20, edges=[1, 9])
    with pytest.raises(ValueError, match="fill no window of length=21"):
        decoders.loss_by_position(make("llama"), text(1, 20)[0], length=21)


@pytest.mark.parametrize("distance", [12, 40, 100])
def test_a_needle_stands_at_its_distance(distance):
    found = needles.needle(TOKENIZER, REAL, distance, length=120, number=3)
    assert len(found.ids) == 120
    words = TOKENIZER.convert_ids_to_tokens(found.ids.tolist())
    answer = words[-needles.DIGITS :]
    said = 120 - needles.DIGITS - distance
    assert words[said : said + needles.DIGITS] == answer and "".join(answer).isdigit()
    question = words[-needles.DIGITS - 6 : -needles.DIGITS]
    assert words[said - 6 : said] == question and question[0] == "The" and question[-1] == "is"
    assert words.count("magic") == 2
    filler = [w for w in words if w.islower() and w not in ("magic", "number", "of", "is")]
    assert "".join(filler) in article(400, 0).replace(" ", "")


def test_needles_differ_and_can_be_drawn_again():
    drawn = [needles.needle(TOKENIZER, REAL, 50, length=90, number=i).ids for i in (0, 1, 0)]
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    absent = needles.needle(TOKENIZER, REAL, None, length=90, number=0)
    assert torch.equal(absent.ids[-11:], drawn[0][-11:])
    assert TOKENIZER.convert_ids_to_tokens(absent.ids.tolist()).count("magic") == 1
    for distance in (3, 80):
        with pytest.raises(ValueError, match=rf"distance={distance} is not possible.* 12 to 79"):
            needles.needle(TOKENIZER, REAL, distance, length=90)
    with pytest.raises(ValueError, match=r"has 400 tokens, 577 are needed"):
        needles.needle(TOKENIZER, REAL, 300, length=600)


class Copies(nn.Module):
    """Says what followed the last four tokens when they last stood at most ``reach`` before."""

    device = torch.device("cpu")

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, ids, use_cache=False):
        logits = torch.zeros(*ids.shape, len(TOKENIZER))
        for row, line in enumerate(ids.tolist()):
            for i, j in itertools.product(range(4, len(line)), range(4, len(line))):
                if 0 < i - j <= self.reach and line[i - 3 : i + 1] == line[j - 3 : j + 1]:
                    logits[row, i, line[j + 1]] = 20.0
        return types.SimpleNamespace(logits=logits)


@pytest.mark.parametrize("together", [1, 3])
def test_a_model_that_copies_finds_needles_within_its_reach(together, monkeypatch):
    monkeypatch.setattr(needles, "rows_at_once", lambda model, length: together)
    models = {"far": Copies(200), "near": Copies(30)}
    distances = [20, 30, 31, 60, None]
    rows = needles.find_needles(models, TOKENIZER, REAL, distances, length=90, count=4)
    exact = {(row["model"], row["distance"]): row["exact"] for row in rows}
    assert [exact["far", d] for d in distances] == [1, 1, 1, 1, 0]
    assert [exact["near", d] for d in distances] == [1, 1, 0, 0, 0]
    for row in rows:
        size = math.log(len(TOKENIZER)) * needles.DIGITS
        known = 0.0 if row["exact"] else -size
        assert row["log_probability"] == pytest.approx(known, abs=1e-3)
        assert (row["token_accuracy"] == 1) == (row["exact"] == 1)


def test_a_real_model_is_asked_as_it_decodes():
    """exact is 1 where greedy decoding gives the answer: here it never does by chance."""
    model = make("llama", vocab_size=len(TOKENIZER))
    [row] = needles.find_needles({"a": model}, TOKENIZER, REAL, [40], length=80, count=3)
    asked = needles.needle(TOKENIZER, REAL, 40, length=80, number=0)
    with torch.no_grad():
        told = model(asked.ids[None]).logits[0, -6:-1].log_softmax(-1)
    first = told.gather(1, asked.ids[-5:, None]).sum().item()
    others = needles.find_needles({"a": model}, TOKENIZER, REAL, [40], length=80, count=1)
    assert others[0]["log_probability"] == pytest.approx(first, rel=1e-5)
    assert row["needles"] == 3 and row["log_probability"] < -5


def test_generation_side_by_side():
    model = make("llama", vocab_size=len(TOKENIZER))
    student = copy.deepcopy(model)
    prompts = [article(20, 1), article(9, 2)]
    options = {"max_new_tokens": 12}
    for row in decoders.side_by_side(model, student, TOKENIZER, prompts, **options):
        assert row["teacher"] == row["student"] and row["same"] == row["tokens"] == 12
    lln.hf.replace(student, "lln", quiet=True, alpha=1.0, beta=1.0)
    rows = decoders.side_by_side(model, student, TOKENIZER, prompts, **options)
    assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        ids = torch.tensor([TOKENIZER(row["prompt"])["input_ids"]])
        out = [
            m.generate(ids, do_sample=False, **options)[0, ids.shape[1] :] for m in (model, student)
        ]
        same = (out[0] == out[1]).long().cumprod(0).sum().item()
        assert row["same"] == same < 12 and row["teacher"] != row["student"]
