"""Rows and masking: shares, purity, and what padding and packing mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lln_study.data.mlm import Masking, Rows, batch, in_order
from lln_study.data.tokens import END, MASK, PAD, START, Tokens

VOCABULARY = 1000
CPU = torch.device("cpu")


def corpus(*lengths: int) -> Tokens:
    """Articles whose ids count up from 5, so that a row shows where it comes from."""
    parts = []
    for length in lengths:
        parts.append(np.append(5 + np.arange(length) % 900, END).astype(np.uint16))
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Tokens(np.concatenate(parts), starts)


def rows(kind: str, length: int = 32) -> Rows:
    return Rows(corpus(300, 17, 100), length=length, kind=kind, device=CPU)


def text(count: int = 64, length: int = 128) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(5, VOCABULARY, (count, length), generator=draw)


def test_shares_are_15_and_80_10_10_per_cent():
    ids = text(400)
    found = Masking(VOCABULARY, seed=0).hide(ids, step=7, first_row=0)
    places, labels = found["positions"], found["labels"]
    assert places.shape == (400, round(0.15 * 128))
    assert all(len(set(line)) == len(line) for line in places.tolist())
    shown = found["input_ids"].gather(1, places)
    assert torch.equal(labels, ids.gather(1, places))
    masked, kept = shown == MASK, shown == labels
    other = ~masked & ~kept
    total = shown.numel()  # 7600: three standard deviations are 1.4 and 1.0 points
    assert abs(masked.sum() / total - 0.8) < 0.014
    assert abs(kept.sum() / total - 0.1) < 0.011
    assert abs(other.sum() / total - 0.1) < 0.011
    assert shown[other].min() >= 5 and shown[other].max() < VOCABULARY
    assert shown[other].unique().numel() > 400
    untouched = torch.ones_like(ids, dtype=torch.bool).scatter(1, places, False)
    assert torch.equal(found["input_ids"][untouched], ids[untouched])


def test_every_position_is_hidden_equally_often():
    ids = text(1000, 40)
    places = Masking(VOCABULARY, seed=1).hide(ids, 0, 0)["positions"]
    counts = torch.bincount(places.flatten(), minlength=40).double()
    expected = 6 / 40
    deviation = (expected * (1 - expected) * 1000) ** 0.5
    assert (counts - 1000 * expected).abs().max() < 4 * deviation


def test_masking_is_a_function_of_seed_step_and_row():
    ids, masking = text(8), Masking(VOCABULARY, seed=0)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    whole = masking.hide(ids, 3, 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    parts = [masking.hide(ids[:4], 3, 0), masking.hide(ids[4:], 3, 4)]
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
    places = whole["positions"]
    assert not torch.equal(masking.hide(ids, 4, 0)["positions"], places)
    assert not torch.equal(Masking(VOCABULARY, seed=1).hide(ids, 3, 0)["positions"], places)
    assert not torch.equal(places[0], places[1])


def test_packed_rows_follow_each_other():
    packed = rows("packed")
    ids = packed.take(torch.arange(len(packed)))
    assert (ids[:, 0] == START).all() and not (ids == PAD).any()
    stream = ids[:, 1:].flatten()
    assert torch.equal(
        stream, torch.from_numpy(corpus(300, 17, 100).ids.astype(np.int64))[: len(stream)]
    )
    assert len(packed) == (301 + 18 + 101) // 31


def test_padded_rows_are_pieces_of_one_article():
    padded = rows("padded")
    ids = padded.take(torch.arange(len(padded)))
    assert len(padded) == 10 + 1 + 4
    assert (ids[:, 0] == START).all() and ((ids == END).sum(1) == 1).all()
    assert ids[10].tolist() == [START, *range(5, 22), END, *[PAD] * 13]
    pieces = torch.cat([line[(line > MASK)] for line in ids[:10]])
    assert torch.equal(pieces, 5 + torch.arange(300))


def test_padding_is_never_hidden_and_counts_for_nothing():
    padded = rows("padded")
    ids = padded.take(torch.tensor([10, 0]))
    found = Masking(VOCABULARY, seed=0).hide(ids, 0, 0)
    real = found["labels"] >= 0
    assert real.sum(1).tolist() == [round(0.15 * 19), round(0.15 * 32)]
    hidden = ids.gather(1, found["positions"])[real]
    assert (hidden > MASK).all()


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_batch_can_be_had_in_parts(kind):
    source, masking = rows(kind), Masking(VOCABULARY, seed=0)
    whole = batch(source, masking, 5, slice(0, 6), batch_size=6)
    parts = [batch(source, masking, 5, slice(n, n + 2), batch_size=6) for n in (0, 2, 4)]
    assert ("attention_mask" in whole) == (kind == "padded")
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_an_epoch_shows_every_row_once():
    source, masking = rows("padded"), Masking(VOCABULARY, seed=0)
    shown = [batch(source, masking, step, slice(0, 5), batch_size=5) for step in range(3)]
    restored = torch.cat(
        [
            each["input_ids"].scatter(
                1,
                each["positions"],
                torch.where(
                    each["labels"] >= 0,
                    each["labels"],
                    each["input_ids"].gather(1, each["positions"]),
                ),
            )
            for each in shown
        ]
    )
    everything = source.take(torch.arange(15))
    assert sorted(map(tuple, restored.tolist())) == sorted(map(tuple, everything.tolist()))


def test_evaluation_hides_the_same_tokens_in_any_batch_size():
    source, masking = rows("packed"), Masking(VOCABULARY, seed=0)
    large, small = in_order(source, masking, 100), in_order(source, masking, 4)
    assert torch.equal(large[0]["positions"], torch.cat([each["positions"] for each in small]))


def test_ids_beyond_15_bits_survive():
    tokens = Tokens(np.array([40_000, 65_535, 5] * 10, dtype=np.uint16), np.array([0, 30]))
    ids = Rows(tokens, length=16, kind="packed", device=CPU).take(torch.tensor([0]))
    assert ids[0, 1:4].tolist() == [40_000, 65_535, 5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "folded"}, "batches='folded' is unknown; choose from packed, padded"),
        ({"length": 4}, "length=4 is too short"),
        ({"length": 1000}, r"length=1000 is longer than the text, which has 420 tokens"),
    ],
)
def test_impossible_rows_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Rows(corpus(300, 17, 100), **{"length": 32, "kind": "packed", "device": CPU, **options})
