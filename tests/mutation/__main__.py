"""Change the source a little, many times, and see whether a test of the changed module fails.

    python -m tests.mutation --count 240 --seed 0         rows into build/mutation.jsonl
    python -m tests.mutation --stored --all               those of stored.json, by all tests

Every change is made in a copy of the tree and taken back, and runs in a fork of a process that has
loaded torch already, so that most take seconds. Tests are timed once without any change, where they
must pass. Of those in ``table.py`` the quickest that fit into ``--budget`` seconds run: tests of
``make test``, with ``--all`` those of ``make test-all``, too. What was tried before is not tried
again, except for survivors when the budget is larger. A survivor is an equivalent change or a test
that is missing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.mutation.mutants import Mutant, draw, mutants_of
from tests.mutation.stored import stored
from tests.mutation.table import ROOT, killers_of, sources
from tests.mutation.tree import Tree

LOADED = ("tests.conftest", "torch._dynamo", "transformers")
_tree: Tree | None = None


def _make_tree(parent: str, marks: str) -> None:
    global _tree
    _tree = Tree(Path(tempfile.mkdtemp(dir=parent)), marks)


def _time(file: str) -> tuple[str, dict[str, float]]:
    assert _tree is not None
    told = _tree.test([file], None, limit=1200.0)
    if told["failed"]:
        raise RuntimeError(f"{told['failed']} without any change; mend that first")
    return file, told["costs"]


def _try(work: tuple[Mutant, Mapping[str, float], float]) -> dict:
    assert _tree is not None
    return _tree.try_out(*work)


def read(path: Path) -> dict[str, dict]:
    """The last row of every change."""
    rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["key"]: row for row in map(json.loads, rows)}


def drawn(count: int, seed: int) -> list[Mutant]:
    """The first ``count`` of the draw."""
    found = [mutant for path in sources() for mutant in mutants_of(ROOT, path)]
    return list(itertools.islice(draw(found, seed), count))


def undecided(found: Sequence[Mutant], budget: float, rows: Mapping[str, dict]) -> list[Mutant]:
    """Those that were not tried yet, or survived a smaller budget."""
    return [
        mutant
        for mutant in found
        if mutant.key not in rows
        or (rows[mutant.key]["verdict"] == "survived" and rows[mutant.key]["budget"] < budget)
    ]


def time_tests(pool: ProcessPoolExecutor, files: Sequence[str], path: Path) -> dict[str, float]:
    """Seconds of every test of the files, from ``path`` where they are there already."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for file, costs in pool.map(_time, [file for file in files if file not in known]):
        print(f"{sum(costs.values()):5.1f} s, {len(costs)} tests: {file}", flush=True)
        known[file] = costs
        path.write_text(json.dumps(known), encoding="utf-8")
    return {name: cost for file in files for name, cost in known[file].items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of tests per change")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a tree")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutation.jsonl")
    parser.add_argument("--stored", action="store_true", help="those of stored.json that apply")
    parser.add_argument("--all", action="store_true", help="by the tests of make test-all, too")
    given = parser.parse_args(arguments)
    marks = "not gpu" if given.all else "not slow and not gpu"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LOADED:
        importlib.import_module(name)
    found = list(stored(ROOT)) if given.stored else drawn(given.count, given.seed)
    mutants = undecided(found, given.budget, read(given.out))
    files = sorted({file for mutant in mutants for file in killers_of(mutant.path)})
    with (
        tempfile.TemporaryDirectory() as parent,
        ProcessPoolExecutor(given.jobs, get_context("fork"), _make_tree, (parent, marks)) as pool,
    ):
        costs = time_tests(pool, files, given.out.with_suffix(".seconds.json"))
        for row in pool.map(_try, [(mutant, costs, given.budget) for mutant in mutants]):
            with given.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
            place = f"{row['path']}:{row['line']}"
            print(
                f"{row['verdict']:9}{row['seconds']:5.1f} s {place} {row['operator']}", flush=True
            )
    keys = {mutant.key for mutant in found}
    rows = [row for key, row in read(given.out).items() if key in keys]
    killed = sum(row["verdict"] == "killed" for row in rows)
    print(f"{killed} of {len(rows)} changes were noticed: {given.out}")


if __name__ == "__main__":
    main()
