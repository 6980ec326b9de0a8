"""Run a part of the tests with other versions: ``make test-versions``.

    python -m tests.versions                       all combinations that this machine can make
    python -m tests.versions --only oldest --torch 2.8.0

Each combination is an environment under build/versions, made anew unless it is there. Prints a
table and writes it to results/versions.json; what cannot be had is said, and is not a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lln.records import files, machine

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "versions"
RESULTS = ROOT / "results" / "versions.json"
TOOLS = ("pytest>=8", "hypothesis>=6.100", "beartype>=0.18", "accelerate>=1.10")
# A part of the suite for each thing that a version has broken before: a few minutes in all.
PARTS = {
    "functions": ["tests/test_functional.py", "-k", "not compile"],
    "modules": ["tests/nn/test_attention.py", "tests/nn/test_running.py", "-k", "not compile"],
    "compile": ["tests/nn/test_attention.py", "tests/ops", "tests/test_functional.py",
                "--ignore=tests/ops/triton", "-k", "compile"],
    "export": ["tests/nn/test_export.py"],
    "zoo": ["tests/test_zoo.py", "-k", "max_length or impossible or wrong or defaults"],
    "Hugging Face": ["tests/hf/test_saving.py", "tests/hf/test_arguments.py"],
    "saved files": ["tests/test_saved_files.py"],
    "command": ["tests/cli", "tests/test_cli.py"],
}  # fmt: skip


@dataclass(frozen=True)
class Combination:
    """Versions to be tried; None is the newest that can be installed."""

    name: str
    python: str
    torch: str | None
    transformers: str | None


def floor(package: str) -> str:
    """The oldest version that pyproject.toml declares, with all its digits."""
    found = re.search(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert found is not None
    return found[1] if found[1].count(".") == 2 else f"{found[1]}.0"


def pinned() -> str:
    """The torch of constraints.txt."""
    found = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert found is not None
    return found[1]


def combinations() -> tuple[Combination, ...]:
    """Oldest, pinned and newest torch; oldest and newest transformers; both ends of Python."""
    oldest = floor("transformers")
    return (
        Combination("oldest", "3.10", floor("torch"), oldest),
        Combination("pinned", "3.11", pinned(), None),
        Combination("pinned, oldest transformers", "3.11", pinned(), oldest),
        Combination("newest", "3.13", None, None),
    )


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine: on the path, or one that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")]
    for candidate in [sys.executable, *filter(None, candidates)]:
        done = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return str(candidate)
    return None


def environment(wanted: Combination, place: Path) -> str | None:
    """Make an environment of these versions; the reason if that is not possible."""
    python = interpreter(wanted.python)
    if python is None:
        return f"no Python {wanted.python} on this machine"
    if (place / ".complete").exists():
        return None
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    versions = {"torch": wanted.torch, "transformers": wanted.transformers}
    exact = [f"{name}=={value}" if value else name for name, value in versions.items()]
    packages = ["-e", f"{ROOT}[train]", *exact, *TOOLS]
    done = subprocess.run(
        [*installer(place / "bin" / "python"), *packages], capture_output=True, text=True
    )
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        return f"cannot be installed: {' '.join(said[-3:])[-300:]}"
    (place / ".complete").touch()
    return None


def installer(python: Path) -> list[str]:
    """Prefer uv, which shares files between environments; pip does the same."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        return [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    links = os.environ.get("PIP_FIND_LINKS")
    found = ["--find-links", links] if links else []
    return [uv, "pip", "install", "--quiet", "--python", str(python), *found]


def run_part(python: Path, arguments: Sequence[str], report: Path) -> dict[str, Any]:
    """Run tests with an interpreter; the counts, and the names of what failed."""
    report.unlink(missing_ok=True)
    subprocess.run(
        [
            *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"),
            *(f"--junitxml={report}", *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0, "names": ["the tests did not start"]}
    return counts(report)


def counts(report: Path) -> dict[str, Any]:
    """Read a JUnit file."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    names = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "passed"
        kind = "skipped" if "skipped" in kinds else kind
        found[kind] += 1
        if kind == "failed":
            names.append(f"{case.get('classname')}::{case.get('name')}")
    if not sum(found.values()):
        return {**found, "failed": 1, "names": ["no test was found"]}
    return {**found, "names": names}


def try_out(wanted: Combination, parts: dict[str, list[str]]) -> dict[str, Any]:
    """Make the environment of a combination, run the parts, and tell how it went."""
    place = PLACE / re.sub(r"\W+", "-", f"{wanted.name}-{wanted.torch}-{wanted.transformers}")
    row: dict[str, Any] = {
        "name": wanted.name,
        "python": wanted.python,
        "torch": wanted.torch or "newest",
        "transformers": wanted.transformers or "newest",
        "commit": machine.commit(),
        "machine": machine.device_name(),
        "date": time.strftime("%Y-%m-%d"),
    }
    reason = environment(wanted, place)
    if reason is not None:
        return {**row, "outcome": f"not available: {reason}"}
    python = place / "bin" / "python"
    code = (
        "import platform, torch, transformers as t; "
        "print(platform.python_version(), torch.__version__, t.__version__)"
    )
    told = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if told.returncode:
        return {**row, "outcome": f"does not start: {told.stderr.strip().splitlines()[-1]}"}
    row |= dict(zip(("python", "torch", "transformers"), told.stdout.split(), strict=True))
    started = time.perf_counter()
    row["parts"] = {}
    for name, arguments in parts.items():
        row["parts"][name] = run_part(python, arguments, place / "report.xml")
        print(f"  {wanted.name}: {name} {_shown(row['parts'][name])}", flush=True)
    failed = sum(part["failed"] for part in row["parts"].values())
    row["seconds"] = round(time.perf_counter() - started)
    return {**row, "outcome": "green" if failed == 0 else f"{failed} failed"}


def _shown(part: dict[str, Any] | None) -> str:
    if part is None:
        return "–"
    return f"{part['passed']} passed" + (f", {part['failed']} FAILED" if part["failed"] else "")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per combination, as Markdown."""
    columns = ["", "Python", "torch", "transformers", *PARTS, "outcome"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        parts = [_shown(row.get("parts", {}).get(name)) for name in PARTS]
        versions = [row["name"], row["python"], row["torch"], row["transformers"]]
        lines.append([*versions, *parts, row["outcome"]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Put rows into the file, in place of those of the same versions; return all of them."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else []

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["name"], row["torch"]

    new = {key(row) for row in rows}
    every = [*(row for row in known if key(row) not in new), *rows]
    files.write_text(path, json.dumps(every, indent=1) + "\n")
    return every


def main(words: Sequence[str] | None = None) -> int:
    """Try all combinations, or some; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", action="append", metavar="NAME", help="of a combination; repeat")
    parser.add_argument("--part", action="append", choices=PARTS, help="of the tests; repeat")
    parser.add_argument("--torch", help="instead of the combination's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    chosen = [each for each in combinations() if not given.only or each.name in given.only]
    if not chosen:
        names = ", ".join(each.name for each in combinations())
        parser.error(f"--only {given.only} is no combination; there are {names}")
    if given.torch:
        chosen = [replace(each, torch=given.torch) for each in chosen]
    parts = {name: PARTS[name] for name in given.part or PARTS}
    rows = []
    for each in chosen:
        rows.append(try_out(each, parts))
        write(rows, given.out)
    print(table(rows))
    return int(any("failed" in row["outcome"] or "start" in row["outcome"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
