"""Is this a release? ``make release-check``, with whatever version is declared.

    python -m tests.release                        everything
    python -m tests.release --extra hf             the library alone, and with this extra

Builds wheel and sdist, installs them into empty environments, without and with each extra, and runs
README's examples there, far from the clone. Exits with 1 if a line of its table is not "ok".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.versions import ROOT, installer

PLACE = ROOT / "build" / "release"
# Extras in whose environments transformers is, which the later examples of README need.
WITH_TRANSFORMERS = ("hf", "convert", "train", "cluster", "docs")
WITH_COMMAND = ("cli", "convert", "train", "cluster", "docs")
Line = tuple[str, str]


def extras() -> list[str]:
    """The extras for users that pyproject.toml declares: all but "dev"."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return [name for name in re.findall(r"^(\w+) = \[", section, flags=re.M) if name != "dev"]


def disagreements() -> list[str]:
    """Where package, CHANGELOG and CITATION do not name the same version and date."""
    declared = re.search(r'^__version__ = "(.+)"', _text("lln/__init__.py"), flags=re.M)
    assert declared is not None
    version, found = declared[1], []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"version {version} is not MAJOR.MINOR.PATCH")
    latest = re.search(r"^## \[(\d[^\]]*)\] - (\S+)", _text("CHANGELOG.md"), flags=re.M)
    if latest is None or latest[1] != version:
        found.append(f"CHANGELOG.md has no section [{version}] - DATE before those of others")
    citation = _text("CITATION.cff")
    if f"version: {version}\n" not in citation:
        found.append(f"CITATION.cff does not say version: {version}")
    if latest is not None and f"date-released: {latest[2]}\n" not in citation:
        found.append(f"CITATION.cff does not say date-released: {latest[2]}, as CHANGELOG.md does")
    return found


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def examples(transformers: bool) -> str:
    """README's Python blocks as one program; without transformers those before it is imported."""
    blocks = re.findall(r"^```python\n(.*?)^```", _text("README.md"), flags=re.M | re.S)
    kept = blocks if transformers else [block for block in blocks if "transformers" not in block]
    assert kept and len(blocks) > 1
    return "\n".join(kept)


def build(folder: Path) -> tuple[Path, Path]:
    """Make wheel and sdist; return their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = []
    for kind in ("build_wheel", "build_sdist"):
        code = f"from hatchling.build import {kind}; print({kind}({str(folder)!r}))"
        done = _run([sys.executable, "-c", code], ROOT)
        if done.returncode:
            raise SystemExit(f"{kind} failed:\n{done.stderr}")
        made.append(folder / done.stdout.splitlines()[-1])
    return made[0], made[1]


def _run(command: Sequence[str | Path], where: Path) -> subprocess.CompletedProcess[str]:
    """Run far from the clone: nothing on the path, nothing in the folder."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, command)), cwd=where, env=outside, capture_output=True, text=True
    )


def _outcome(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return "ok"
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"FAILED: {said[-1][:200] if said else done.returncode}"


def install_and_run(file: Path, extra: str | None, place: Path) -> list[Line]:
    """Install into an empty environment and try what a user would; a line for each step."""
    name = "wheel" if file.suffix == ".whl" else "sdist"
    name += f" [{extra}]" if extra else ""
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    wanted = f"lln-attention[{extra}] @ {file.as_uri()}" if extra else str(file)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    done = _run([*installer(python), *constraints, wanted], place)
    lines = [(f"{name}: installed", _outcome(done))]
    if done.returncode:
        return lines
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        program = where / "readme.py"
        program.write_text(examples(extra in WITH_TRANSFORMERS), encoding="utf-8")
        lines.append((f"{name}: README's examples", _outcome(_run([python, program], where))))
        if extra in WITH_COMMAND:
            done = _run([place / "bin" / "lln", "list", "lln_diag"], where)
            lines.append((f"{name}: lln list", _outcome(done)))
            done = _run([place / "bin" / "lln", "train"], where)
            said = "ok" if "needs a clone" in done.stderr else _outcome(done)
            lines.append((f"{name}: lln train says what it needs", said))
    return lines


def check(chosen: Sequence[str]) -> list[Line]:
    """All lines of the table."""
    wheel, sdist = build(PLACE / "dist")
    lines = [("version, CHANGELOG and CITATION agree", "; ".join(disagreements()) or "ok")]
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
    for file, extra in [(wheel, None), (sdist, None), *((wheel, extra) for extra in chosen)]:
        lines += install_and_run(file, extra, PLACE / f"env-{extra or file.suffix.lstrip('.')}")
        print("\n".join(f"  {what}: {how}" for what, how in lines[-4:]), flush=True)
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Check, print a table, and return 1 unless all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", action="append", choices=extras(), help="repeat; default: each")
    given = parser.parse_args(words)
    lines = check(given.extra or extras())
    width = max(len(what) for what, _ in lines)
    print("\n".join(f"{what:{width}}  {how}" for what, how in lines))
    return int(any(how != "ok" for _, how in lines))


if __name__ == "__main__":
    raise SystemExit(main())
