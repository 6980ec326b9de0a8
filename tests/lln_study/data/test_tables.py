"""Generated tables: classes depend on features, are balanced enough, and come again with a seed."""

from __future__ import annotations

import pytest
import torch

from lln_study.data.tables import CLASSES, FEATURES, KINDS, draw
from lln_study.tasks.table import nearest

ROWS, QUESTIONS, COUNT = 512, 64, 24


@pytest.mark.parametrize("kind", KINDS)
def test_classes_depend_on_features(kind):
    """Neighbours know more than the most frequent class, and nothing of shuffled rows."""
    features, labels = draw(COUNT, ROWS + QUESTIONS, kinds=(kind,), seed=3)
    context, asked = labels[:, :ROWS], labels[:, ROWS:]
    votes = torch.nn.functional.one_hot(context, CLASSES).sum(1).argmax(-1)

    def right(found):
        return (found == asked).float().mean().item()

    frequent = right(votes[:, None])
    assert right(nearest(features, context)) > frequent + 0.1
    mixed = torch.cat([features[:, :ROWS].roll(1, dims=1), features[:, ROWS:]], dim=1)
    assert right(nearest(mixed, context)) < frequent + 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_balanced_enough(kind):
    _, labels = draw(COUNT, ROWS, kinds=(kind,), seed=0)
    share = torch.nn.functional.one_hot(labels, CLASSES).float().mean(1)  # [B, 10]
    number = labels.amax(1) + 1
    assert number.min() == 2 and number.max() >= 8
    assert share.max(1).values.mean() < 0.55
    assert (share.max(1).values > 0.95).sum() <= 1  # hardly a table has but one class


def test_columns_are_as_those_of_real_tables():
    features, _ = draw(200, 64, seed=0)
    missing = features.isnan()
    filled = features.nan_to_num(0)
    used = (filled != 0).any(1)
    assert used.sum(1).min() >= 2 and used.sum(1).max() > FEATURES - 4
    assert (~used.cummin(1).values & used).sum() == 0  # the columns of a table are its first
    gaps = missing.float().mean((1, 2))
    assert 0.3 < (gaps > 0).float().mean() < 0.7 and missing.float().mean() < 0.1
    whole = ((filled == filled.round()).all(1) & used).float().sum() / used.sum()
    assert 0.05 < whole < 0.25  # categories


def test_a_seed_gives_the_same_tables():
    first, again, other = (draw(6, 40, seed=seed) for seed in (7, 7, 8))
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x.nan_to_num(-1), y.nan_to_num(-1))
    assert not torch.equal(first[1], other[1])


def test_kinds_take_turns_and_others_are_refused():
    one = draw(8, 40, kinds=("cells", "tree"), seed=0)[1]
    two = draw(8, 40, kinds=("cells", "linear"), seed=0)[1]
    assert torch.equal(one[::2], two[::2]) and not torch.equal(one[1::2], two[1::2])
    with pytest.raises(ValueError, match="choose from network, cells"):
        draw(2, 10, kinds=("forest",), seed=0)
