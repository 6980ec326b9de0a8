"""A copy of the tree in which one file at a time is changed, and tests run in forks."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.table import CHOICE, ROOT, killers_of

COPIED = ("lln", "lln_study", "tests", "examples", "docs", "pyproject.toml", "README.md")
LONGEST_FILE = 60.0  # seconds of a file of tests in which its tests are timed; the rest is not used


class Watch:
    """What a process of pytest tells: the first failure, and the seconds of each test.

    Args:
        order: Only these tests, in this order; all if None.
        enough: Seconds after which no further test is begun.
    """

    def __init__(self, order: Sequence[str] | None, enough: float) -> None:
        self.order, self.enough = order, enough
        self.failed: str | None = None
        self.costs: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.order is not None:
            by_name = {item.nodeid: item for item in items}
            items[:] = [by_name[name] for name in self.order if name in by_name]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        begin = _cpu_seconds()
        done = yield
        self.costs[item.nodeid] = round(_cpu_seconds() - begin, 3)
        if sum(self.costs.values()) > self.enough:
            item.session.shouldstop = "enough"
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


class Tree:
    """The copy; its files are as before whenever no test runs."""

    def __init__(self, folder: Path, marks: str = "not slow and not gpu") -> None:
        self.folder, self.marks = folder, marks
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)
        # By content: two changes of the same length may come within the same second.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        for package in ("lln", "lln_study"):
            compileall.compile_dir(folder / package, quiet=1, invalidation_mode=checked)

    def try_out(self, mutant: Mutant, costs: Mapping[str, float], budget: float) -> dict[str, Any]:
        """The row of one change, after the quickest of its tests that fit in ``budget`` seconds."""
        order = within(budget, killers_of(mutant.path), costs)
        path = self.folder / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.apply(source))
        begin = time.monotonic()
        try:
            told = self.test(killers_of(mutant.path), order, limit=60 + 10 * budget)
        finally:
            path.write_bytes(source)
        seconds = round(time.monotonic() - begin, 1)
        row = {"key": mutant.key, **asdict(mutant), "budget": budget, "tests": len(order)}
        row |= {"verdict": told["verdict"], "by": told["failed"], "seconds": seconds}
        return {name: row[name] for name in row if name not in ("start", "end", "source")}

    def test(self, files: Sequence[str], order: Sequence[str] | None, limit: float) -> dict:
        """Run pytest in a fork; too long, and broken before any test could run, is a failure."""
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._become_pytest(files, order, report)
        in_time = _ends(child, time.monotonic() + limit)
        told = json.loads(report.read_text()) if report.exists() else {}
        failed = told.get("failed") if told else ("cannot be imported" if in_time else "too long")
        return {
            "verdict": "killed" if failed else "survived",
            "failed": failed,
            "costs": told.get("costs", {}),
        }

    def _become_pytest(self, files: Sequence[str], order: Sequence[str] | None, report: Path):
        try:
            os.setsid()
            log = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.path[:] = [str(self.folder), *(x for x in sys.path if x not in ("", str(ROOT)))]
            for name in list(sys.modules):
                if name.split(".")[0] in ("lln", "lln_study", "tests"):
                    del sys.modules[name]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", self.marks, "-k", CHOICE]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            watch = Watch(order, LONGEST_FILE)
            status = pytest.main([*options, *files], plugins=[watch])
            none_chosen = status == pytest.ExitCode.NO_TESTS_COLLECTED  # all are slow
            if watch.costs or watch.failed or none_chosen:
                failed = watch.failed or (f"status {status}" if status in (3, 4) else None)
                report.write_text(json.dumps({"failed": failed, "costs": watch.costs}))
        finally:
            sys.stdout.flush()
            os._exit(0)


def within(budget: float, files: Sequence[str], costs: Mapping[str, float]) -> list[str]:
    """The tests of these files, the quickest first, as many as fit.

    The second case of a test counts as if it took twice as long, and so on: many cases of one test
    notice less than some of many.
    """
    own = [name for name in costs if name.split("::")[0].startswith(tuple(files))]
    cases: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for name in sorted(own, key=lambda name: costs[name]):
        test = name.split("[")[0]
        cases[test] += 1
        weights[name] = costs[name] * cases[test]
    order, spent = [], 0.0
    for name in sorted(own, key=lambda name: weights[name]):
        spent += costs[name]
        if spent > budget:
            break
        order.append(name)
    return order


def _cpu_seconds() -> float:
    """Of this process and of those it has waited for: what else the machine does is no part."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _ends(child: int, until: float) -> bool:
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
