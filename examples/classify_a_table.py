"""A table classified in context, from a state: python examples/classify_a_table.py [FIGURE.svg]

Needs a clone. Trains a small model with LLN on generated tables, two to three minutes on a CPU.
Then a table of tumours, new to it: labelled rows are summarised once, into states of constant size,
and questions are read from them, beside the nearest neighbours of scikit-learn.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel, as_files
from lln.report.progress import shown
from lln_study.tasks import real_tables, table
from lln_study.train.loop import train

LLN = {"attention": "lln", "options": {"method": "entropy"}}
SMALL = {"layers": 3, "width": 64, "heads": 2, "feed_forward": 128, "precision": "fp32"}
CONTEXTS = {"least": 32, "most": 128, "questions": 32, "valid_rows": 128, "tables": 32}
UPDATES = {"kinds": ["network", "linear"], "batch_size": 16, "learning_rate": 2e-3}
ROWS = (20, 40, 80, 160, 284)


class InContext:
    """The model with the face of scikit-learn: fitting is reading the context once."""

    def __init__(self, steps: int) -> None:
        config = table.configure(**LLN, steps=steps, **SMALL, **CONTEXTS, **UPDATES)
        summary = train(table.Table(config), config.train, None, progress=shown("LLN"))
        self.model: Any = summary.model

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        self.memory = self.model.remember(_rows(x), torch.tensor(y)[None])

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model.answer(self.memory, _rows(x))[0].argmax(-1).numpy()


def _rows(x: np.ndarray) -> torch.Tensor:
    return F.pad(torch.tensor(x, dtype=torch.float32), (0, 32 - x.shape[1]))[None]


def main(steps: int, figure: str = "classify_a_table.svg") -> dict[str, list[float]]:
    rivals = {"LLN": InContext(steps), "k-NN": real_tables.classifiers()["k nearest neighbours"]()}
    x, y, questions, answers = next(real_tables.splits("breast_cancer"))
    right, ms = ({name: [] for name in rivals} for _ in range(2))
    for rows in ROWS:
        for name, rival in rivals.items():
            rival.fit(x[:rows], y[:rows])
            started = time.perf_counter()
            right[name].append(float((rival.predict(questions) == answers).mean()))
            ms[name].append(1e3 * (time.perf_counter() - started))
            print(f"{rows:4d} rows, {name:4s}: {right[name][-1]:.3f} in {ms[name][-1]:.1f} ms")
    panels = []
    for label, values in (("accuracy", right), (f"ms for {len(answers)} questions", ms)):
        curves = [Curve(name, ROWS, values[name], slot=i) for i, name in enumerate(rivals)]
        panels.append(Panel(label, curves, Axis("rows of the context", log=True), Axis(label)))
    Path(figure).write_bytes(as_files("classify_a_table", panels)["svg"])
    return right


if __name__ == "__main__":
    main(1600, *sys.argv[1:])
