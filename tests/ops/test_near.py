"""lln.Near: its fields are checked, and it is the same in JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

import lln
from lln import Near


def test_it_is_hashable_and_cannot_be_changed():
    near = Near(8, overlap=3, sinks=1, joint=True)
    assert {near: 1}[Near(8, overlap=3, sinks=1, joint=True)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        near.block = 4  # type: ignore[misc]
    assert lln.Near is Near


@pytest.mark.parametrize(
    "near", [Near(8), Near(8, overlap=3), Near(4, sinks=2, scale=0.5, joint=True)], ids=str
)
def test_it_is_read_from_what_json_holds(near):
    assert Near.read(json.loads(json.dumps(near.to_json()))) == near
    assert Near.read(near) is near
    assert Near.read(dataclasses.asdict(near)) == near


def test_a_number_is_the_size_of_its_blocks_and_none_is_none():
    assert Near.read(8) == Near(8) and Near.read(None) is None
    assert Near(8).to_json() == 8 and Near(8, sinks=1).to_json() == {"block": 8, "sinks": 1}
    assert Near.read(8, head_dim=16) == Near(8, scale=0.25)
    assert Near(8, scale=0.3).at(16) == Near(8, scale=0.3)
    assert Near(8, scale=0.25).shown(16) == 8
    assert Near(8, scale=0.3).shown(16) == Near(8, scale=0.3)


def test_how_many_keys_a_query_sees():
    near = Near(8, overlap=3, sinks=2)
    assert near.keys(False) == 8 + 6 + 2 and near.keys(True) == 8 + 3 + 2
    assert near.ring == 11 and near.origin == 5
    assert [near.first(i) for i in (0, 7, 8, 17)] == [-3, -3, 5, 13]


@pytest.mark.parametrize(
    "given, error, message",
    [
        (0, ValueError, "block=0 must be positive"),
        (2.5, TypeError, "near=2.5 is a float; pass the size of the blocks"),
        (True, TypeError, "near=True is a bool"),
        ("128", TypeError, "near='128' is a str"),
        ({"overlap": 3}, TypeError, "has no 'block'"),
        ({"block": 8, "overlaps": 3}, TypeError, "'overlaps'.*it takes block, overlap"),
        ({"block": 8, "overlap": -1}, ValueError, "overlap=-1 must not be negative"),
        ({"block": 8, "sinks": 1.0}, TypeError, "sinks is a float"),
        ({"block": 8, "scale": float("nan")}, ValueError, "scale=nan must be a finite number"),
        ({"block": 8, "scale": "x"}, ValueError, "scale='x' must be a finite number"),
        ({"block": 8, "joint": 1}, TypeError, "joint=1 must be True or False"),
    ],
)
def test_bad_fields_are_named(given, error, message):
    with pytest.raises(error, match=message):
        Near.read(given)
