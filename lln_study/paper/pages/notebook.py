"""The tutorial as a notebook, made from its page: ``make pages`` writes it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

PAGE = Path("docs", "guide", "tutorial.md")
NOTEBOOK = Path("examples", "tutorial.ipynb")
ABOUT = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook(page: str) -> str:
    """The notebook of a page: a cell of code for each Python block, of words for what is between.

    Links lead from the folder of the notebook instead of that of the page. No output is stored.

    Example:
        >>> json.loads(notebook("# Title\\n\\n```python\\nx = 1\\n```\\n"))["cells"][1]["source"]
        ['x = 1']
    """
    cells = []
    for n, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.M | re.S)):
        text = part.strip("\n")
        if text:
            cells.append(_cell("code" if n % 2 else "markdown", text, len(cells)))
    made = {"cells": cells, "metadata": ABOUT, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    source = text if kind == "code" else _with_links(text)
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return {**cell, "source": source.splitlines(keepends=True)}


def _with_links(text: str) -> str:
    def moved(match: re.Match[str]) -> str:
        target = os.path.relpath(Path(os.path.normpath(PAGE.parent / match[1])), NOTEBOOK.parent)
        return f"]({Path(target).as_posix()}{match[2] or ''})"

    return re.sub(r"\]\((?!https?:)([^)#]+)(#[^)]*)?\)", moved, text)


def write(root: Path) -> None:
    """Write the notebook of a clone; nothing where there is no page."""
    page = root / PAGE
    if page.exists():
        (root / NOTEBOOK).write_text(notebook(page.read_text("utf-8")), encoding="utf-8")
