"""The factor of alpha and beta for more slots than features."""

from __future__ import annotations

import itertools

import pytest
import torch

from lln.moments.slots import (
    FAMILIES,
    HEAD_DIMS,
    MULTIPLES,
    VARIANCES,
    _table,
    first_map,
    simulate,
    slot_factor,
)


@pytest.mark.slow
def test_entries_of_the_table_are_what_the_simulation_gives():
    for entry in (("rotations", 2, 16, 1.0), ("signs", 4, 32, 4.0)):
        family, multiple, head_dim, variance = entry
        found = slot_factor(family, head_dim, multiple * head_dim, variance)
        assert found == pytest.approx(simulate(*entry), abs=2e-3)


def test_as_many_slots_as_features_need_no_factor():
    assert slot_factor("rotations", 64, 64, 1.0) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_at_its_points_the_table_is_read_as_it_is(family):
    for (i, multiple), (j, size), (n, variance) in itertools.product(
        *(list(enumerate(x)) for x in (MULTIPLES, HEAD_DIMS, VARIANCES))
    ):
        found = slot_factor(family, size, multiple * size, variance)
        assert found == pytest.approx(_table()[family][i][j][n], rel=1e-5)
    middle = slot_factor(family, 32, 64, 2.0)  # of 1 and 4
    assert middle == pytest.approx(sum(_table()[family][1][1][1:3]) / 2, rel=1e-5)


def test_between_and_beyond_its_points_the_table_is_monotone_and_bounded():
    variances = torch.tensor([0.01, 0.25, 0.6, 1.0, 3.0, 4.0, 16.0, 99.0])
    for slots in (64, 100, 128, 512, 4096):
        found = slot_factor("signs", 64, slots, variances)
        assert ((found >= 1) & (found < 1.25)).all()
        assert found[0] == found[1] and found[-1] == found[-2]
    growing = [slot_factor("rotations", 48, 48 * m, 1.0) for m in MULTIPLES]
    assert growing == sorted(growing)


def test_blocks_are_orthogonal_and_signs_come_in_pairs():
    maps = first_map("signs", 8, 32)
    torch.testing.assert_close(maps[:, :8], torch.eye(8))
    torch.testing.assert_close(maps[:, 16:24], -maps[:, 24:])
    torch.testing.assert_close(maps[:, 16:24] @ maps[:, 16:24].T, torch.eye(8))
