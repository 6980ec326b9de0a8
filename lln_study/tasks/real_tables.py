"""The tables inside scikit-learn: a trained model in context beside what scikit-learn fits.

Half of the rows are the context, the other half the questions; accuracy is the mean over splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lln.records.rows import Row
from lln_study.data.tables import CLASSES, FEATURES
from lln_study.train import runlog
from lln_study.train.config import TrainConfig

NAMES = ("breast_cancer", "wine", "iris", "digits")
SPLITS = 10
COMPONENTS = 16  # of tables with more columns than a model has
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def splits(name: str, count: int = SPLITS) -> Iterator[Split]:
    """Context and questions, features and classes, of each split of a table."""
    if name not in NAMES:
        raise ValueError(f"name={name!r} is unknown; choose from {', '.join(NAMES)}")
    try:
        from sklearn import datasets
    except ImportError:
        raise ImportError(
            "real tables need scikit-learn: pip install 'lln-attention[train]'"
        ) from None
    from sklearn.decomposition import PCA

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    for seed in range(count):
        order = np.random.default_rng(seed).permutation(len(y))
        known, asked = order[: len(y) // 2], order[len(y) // 2 :]
        context, questions = x[known], x[asked]
        if x.shape[1] > FEATURES:
            reduced = PCA(COMPONENTS, random_state=0).fit(context)
            context, questions = reduced.transform(context), reduced.transform(questions)
        yield context, y[known], questions, y[asked]


@torch.no_grad()
def in_context(model: nn.Module, device: torch.device, count: int = SPLITS) -> dict[str, float]:
    """Accuracy of a :class:`lln_study.tasks.models.table.TableModel`, in %/100, by table."""
    model.eval()

    def right(x: np.ndarray, y: np.ndarray, questions: np.ndarray, answers: np.ndarray) -> float:
        rows = torch.tensor(np.concatenate([x, questions]), dtype=torch.float32, device=device)
        labels = torch.tensor(y, dtype=torch.long, device=device)
        scores = model(F.pad(rows, (0, FEATURES - rows.shape[1]))[None], labels[None])[0]
        missing = torch.arange(CLASSES, device=device) > labels.max()
        found = scores.masked_fill(missing, -torch.inf).argmax(-1)
        return float((found.cpu().numpy() == answers).mean())

    return _means(right, count)


def _means(right: Callable[..., float], count: int) -> dict[str, float]:
    return {
        name: float(np.mean([right(*split) for split in splits(name, count)])) for name in NAMES
    }


def classifiers() -> dict[str, Callable[[], Any]]:
    """What scikit-learn fits, by name, with its own defaults."""
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "k nearest neighbours": lambda: make_pipeline(StandardScaler(), KNeighborsClassifier()),
        "logistic regression": lambda: make_pipeline(
            StandardScaler(), LogisticRegression(max_iter=1_000)
        ),
        "gradient boosting": lambda: GradientBoostingClassifier(random_state=0),
    }


def fitted(name: str, count: int = SPLITS) -> dict[str, float]:
    """Accuracy of a classifier of scikit-learn, by table."""
    make = classifiers()[name]
    return _means(lambda x, y, *asked: float(make().fit(x, y).score(*asked)), count)


def fitted_row(name: str, count: int = SPLITS) -> Row:
    """The same as a result row, beside those of the models."""
    settings = {"experiment": "table_fitted", "splits": count, "sklearn": _version()}
    config = TrainConfig(attention=name)
    columns = {"real": fitted(name, count)}
    where = {"seconds": 0.0, "device": "cpu"}
    return runlog.result_row("table_fitted", config, settings, columns, **where)


def _version() -> str:
    from lln.records.machine import version

    return version("scikit-learn")
