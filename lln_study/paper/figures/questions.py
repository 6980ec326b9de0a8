"""Measurements behind docs/questions.md.

``python -m lln_study.paper.figures.questions [RESULTS_FOLDER]`` runs them.

Each function yields the rows of one table; they are kept in ``results/questions_…json`` and written
into the page by :mod:`lln_study.paper.pages.formulas`. A few minutes on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lln.functional import attention
from lln.instruments import (
    entropy,
    fit_lognormal,
    log_variance,
    measure,
)
from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.paper.figures.activations import activation_rows
from lln_study.paper.figures.inputs import ATTENTIONS, Attention, gaussian, spread

DRAWS = 6
BLOCK = 64  # of LLN+Diag
CALIBRATIONS = ("LLN paper", "LLN variance", "LLN entropy", "LLN entropy, normalize_keys")


def shape_rows() -> Iterator[Row]:
    """How far ln P is from normal at equal variance σ² = 1, per head size."""
    for head_dim in (16, 32, 64, 128):
        for name in ("softmax", "LLN variance"):
            found: dict[str, list[float]] = {"kolmogorov_smirnov": [], "skew": [], "entropy": []}
            for draw in range(DRAWS):
                p = ATTENTIONS[name].matrix(*gaussian(512, head_dim, seed=draw))
                fit = fit_lognormal(p)
                found["kolmogorov_smirnov"].append(fit.kolmogorov_smirnov.item())
                found["skew"].append(fit.skew.item())
                found["entropy"].append(entropy(p).item())
            yield {"head_dim": head_dim, "attention": name} | _spreads(found)


def matching_rows() -> Iterator[Row]:
    """What each calibration reaches: variance within rows and entropy, beside softmax."""
    for head_dim in (16, 32, 64, 128):
        for variance in (1.0, 4.0):
            inputs = [
                gaussian(512, head_dim, seed=draw, score_variance=variance) for draw in range(DRAWS)
            ]
            softmax = [entropy(ATTENTIONS["softmax"].matrix(q, k)).item() for q, k in inputs]
            for name in CALIBRATIONS:
                matrices = [ATTENTIONS[name].matrix(q, k) for q, k in inputs]
                ratio = [log_variance(p).item() / variance for p in matrices]
                bits = [entropy(p).item() - s for p, s in zip(matrices, softmax, strict=True)]
                row: Row = {"head_dim": head_dim, "score_variance": variance, "attention": name}
                yield row | _spreads({"variance_ratio": ratio, "entropy_difference": bits})


def scale_rows() -> Iterator[Row]:
    """Concentration and gradients for fixed α = β, as in the paper's ablation; softmax first."""
    for scale in (None, 1.0, 2.0, 2.2, 3.0, 6.0):
        found: dict[str, list[float]] = {"entropy": [], "spectral_gap": [], "gradient": []}
        for draw in range(DRAWS):
            q, k = gaussian(512, 64, seed=draw)
            options = {} if scale is None else {"kernel": "lln", "alpha": scale, "beta": scale}
            seen = measure(q, k, measures=("entropy", "spectral_gap"), **options)
            found["entropy"].append(seen.entropy.item())
            found["spectral_gap"].append(seen.spectral_gap.item())
            found["gradient"].append(_gradient(q, k, scale, draw))
        yield {"scale": scale} | _spreads(found)


def _gradient(q: Tensor, k: Tensor, scale: float | None, draw: int) -> float:
    """‖∂(out·g)/∂q‖ for random values and a random g, α and β constant."""
    generator = torch.Generator().manual_seed(1000 + draw)
    v, g = (torch.randn(q.shape, generator=generator, dtype=q.dtype) for _ in range(2))
    q = q.clone().requires_grad_()
    if scale is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    else:
        out = attention(q, k, v, alpha=scale, beta=scale)
    return torch.autograd.grad((out * g).sum(), q)[0].norm().item()


def retrieval_rows() -> Iterator[Row]:
    """Queries that are copies of keys: how often the largest weight falls on the target.

    LLN+Diag attends by softmax within blocks of 64 positions; ``near`` targets lie in the query's
    own block, ``far`` ones anywhere. Without blocks the place of a target makes no difference.
    """
    for tokens, head_dim in ((128, 64), (512, 64), (2048, 64), (512, 16), (512, 256)):
        _, k = gaussian(tokens, head_dim, seed=0)
        far = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
        near = _shuffled_within_blocks(tokens, BLOCK)
        row: Row = {"tokens": tokens, "head_dim": head_dim}
        for name in ("softmax", *CALIBRATIONS):
            row[name] = _found(ATTENTIONS[name], k, far)
        row["LLN+Diag near"] = _found(ATTENTIONS["LLN paper"], k, near, block=BLOCK)
        row["LLN+Diag far"] = _found(ATTENTIONS["LLN paper"], k, far, block=BLOCK)
        yield row


def _shuffled_within_blocks(tokens: int, block: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    parts = torch.arange(tokens).split(block)
    return torch.cat([part[torch.randperm(len(part), generator=generator)] for part in parts])


def _found(chosen: Attention, k: Tensor, target: Tensor, block: int | None = None) -> float:
    q = k[:, :, target]
    p = chosen.matrix(q, k)
    if block is not None:
        index = torch.arange(p.shape[0]) // block
        scores = (q @ k.transpose(-1, -2))[0, 0] / k.shape[-1] ** 0.5
        local = scores.masked_fill(index[:, None] != index, -torch.inf).softmax(-1)
        p = (p + local) / 2
    return (p.argmax(-1) == target).double().mean().item()


def _spreads(found: dict[str, list[float]]) -> Row:
    row: Row = {}
    for name, values in found.items():
        row |= spread(name, values)
    return row


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "shape": shape_rows,
    "matching": matching_rows,
    "scale": scale_rows,
    "retrieval": retrieval_rows,
    "activations": activation_rows,
}


def main(tables: Mapping[str, Callable[[], Iterator[Row]]], subject: str) -> None:
    """Measure all tables on one thread and keep their rows in the folder that is asked for."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    torch.set_num_threads(1)
    facts = machine.facts()
    content = {name: [row | facts for row in rows()] for name, rows in tables.items()}
    print(saved.save_json(content, folder, subject=subject))


if __name__ == "__main__":
    main(TABLES, "questions")
