"""What a row needs to be a result: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parents[1]


def device_name(device: str = "cpu") -> str:
    """Name of the processor, with the number of threads torch uses on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"model name\s*:\s*(.+)", information.read_text())
        if found:
            return re.sub(r"\((R|TM|tm)\)", "", found[1]).strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """Version of an installed package without importing it; empty if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Commit of the checkout this package runs from, ``-dirty`` if its code was changed since.

    ``LLN_COMMIT`` says it where the files were copied without their history.
    """
    if os.environ.get("LLN_COMMIT"):
        return os.environ["LLN_COMMIT"]
    if not (PACKAGE.parent / ".git").exists():
        return f"release {version('lln-attention')}"
    try:
        revision = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "lln", "lln_study")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def facts(device: str = "cpu") -> dict[str, str]:
    """The columns that say where a row comes from."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit(),
    }


def conditions() -> str:
    """What else decides a time on a CPU: how threads wait, and how busy the machine was before."""
    waiting = os.environ.get("OMP_WAIT_POLICY", "default")
    busy = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"OMP_WAIT_POLICY={waiting} load_average={busy}"


def slug(device: str = "cpu") -> str:
    """The device as a part of a file name: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
