"""ListOps: the published parameters, an independent evaluator, shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lln_study.data.arena import listops
from lln_study.data.shards import Recipe, generate
from tests.waiting import HANGS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def some() -> dict[str, np.ndarray]:
    return listops.make(np.random.default_rng([7, 0]), 600)


def test_labels_are_those_of_the_independent_evaluator(some):
    values = [listops.evaluate(tokens) for tokens in some["tokens"]]
    np.testing.assert_array_equal(values, some["labels"])


def test_lengths_and_padding(some):
    length = (some["tokens"] > 0).sum(1)
    assert length.min() > 500 and length.max() < 2000
    behind = np.arange(listops.LENGTH) >= length[:, None]
    assert (some["tokens"][behind] == 0).all()


def test_shares_of_words_and_labels(some):
    tokens = some["tokens"]
    digits = ((tokens >= 1) & (tokens <= 10)).sum(axis=None)
    operators = [(tokens == 11 + i).sum() for i in range(4)]
    closed = (tokens == listops.CLOSE).sum()
    assert sum(operators) == closed
    np.testing.assert_allclose(np.array(operators) / sum(operators), 0.25, atol=0.01)
    # Six arguments on average: 5 of 6 nodes are digits where all levels are full, fewer operators
    # than a quarter because the last level has none.
    assert 0.15 < sum(operators) / (digits + sum(operators)) < 0.2
    share = np.bincount(some["labels"], minlength=10) / len(some["labels"])
    assert share.min() > 0.04 and share.max() < 0.25  # MIN and MAX favour 0 and 9


def test_trees_are_distinct_and_as_deep_as_published(some):
    assert len({row.tobytes() for row in some["tokens"]}) == len(some["tokens"])
    opens = (some["tokens"] >= listops.FIRST_OPERATOR) & (some["tokens"] < listops.CLOSE)
    depth = (opens.astype(int) - (some["tokens"] == listops.CLOSE)).cumsum(1).max(1)
    assert depth.max() == listops.MAX_DEPTH - 1  # the tenth level holds digits only


def test_operators():
    cases = {
        "[MAX 2 9 [MIN 4 7 ] 0 ]": 9,
        "[MED 1 2 8 9 ]": 5,
        "[MED 1 2 3 9 ]": 2,  # the integer part of 2.5
        "[SM 9 9 5 ]": 3,
        "( ( ( [MIN 4 ) ( ( ( [SM 6 ) 6 ) ] ) ) ] )": 2,
    }
    for text, value in cases.items():
        assert listops.evaluate(listops.encode(text)) == value


def test_what_is_no_expression_is_refused():
    with pytest.raises(ValueError, match="no word of ListOps"):
        listops.encode("[MAX 1 12 ]")
    with pytest.raises(ValueError, match="bracket"):
        listops.evaluate(listops.encode("[MAX 1 2"))


def _count(generator: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    return {"tokens": generator.integers(255, size=(count, 3)).astype(np.uint8)}


def test_shards_do_not_depend_on_workers_or_interruptions(tmp_path):
    recipe = Recipe("numbers", _count, 25, seed=3, shard=10)
    alone = generate(recipe, tmp_path / "a", workers=1)["tokens"]
    together = generate(recipe, tmp_path / "b", workers=2)["tokens"]
    np.testing.assert_array_equal(alone, together)
    assert alone.shape == (25, 3)
    longer = generate(Recipe("numbers", _count, 40, seed=3, shard=10), tmp_path / "c", workers=1)
    np.testing.assert_array_equal(longer["tokens"][:25], alone)


def test_generation_continues_after_an_interruption(tmp_path):
    made: list[int] = []

    class Interrupted(Exception):
        pass

    def stop(done: int, total: int) -> None:
        made.append(done)
        if len(made) == 2:
            raise Interrupted

    recipe = Recipe("numbers", _count, 40, shard=10)
    with pytest.raises(Interrupted):
        generate(recipe, tmp_path, workers=1, progress=stop)
    shards = sorted((tmp_path / "numbers" / "shards").iterdir())
    assert len(shards) == 2
    shards[1].write_bytes(shards[1].read_bytes()[:-30])  # cut off while it was written
    again = generate(recipe, tmp_path, workers=1, progress=lambda done, total: made.append(done))
    assert made[2:] == [2, 3, 4]  # the first is not made again, the damaged one is
    whole = generate(recipe, tmp_path / "other", workers=1)
    np.testing.assert_array_equal(again["tokens"], whole["tokens"])
    assert not (tmp_path / "numbers" / "shards").exists()


def test_finished_data_are_read_and_changed_recipes_made_again(tmp_path):
    first = generate(Recipe("numbers", _count, 20, shard=10), tmp_path, workers=1)["tokens"].copy()
    calls: list[int] = []
    note = lambda done, total: calls.append(done)  # noqa: E731
    generate(Recipe("numbers", _count, 20, shard=10), tmp_path, workers=1, progress=note)
    assert calls == []
    other = generate(Recipe("numbers", _count, 20, seed=1, shard=10), tmp_path, workers=1)
    assert not np.array_equal(other["tokens"], first)


def test_a_plain_script_may_generate(tmp_path):
    """Without the guard of ``__main__``: the processes do not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from lln_study.data.arena import listops\n"
        "from lln_study.data.shards import Recipe, generate\n"
        "print('once')\n"
        "recipe = Recipe('few', listops.make, 20, shard=10)\n"
        f"print(len(generate(recipe, Path({str(tmp_path)!r}), workers=2)['tokens']))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=HANGS,
    )
    assert done.stdout.split() == ["once", "20"], done.stderr
