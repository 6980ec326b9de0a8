"""Measurements behind docs/guide/near-and-far.md.

``python -m lln_study.paper.figures.near_far [RESULTS_FOLDER]`` runs them, in a few minutes on one
core; the rows are kept in ``results/near-far_…json`` and written into the page by ``make pages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lln import moments
from lln.moments.slots import first_map, slot_factor
from lln.ops import reference
from lln.ops.window.near import Near
from lln.records.rows import Row
from lln_study.paper.figures.inputs import gaussian, spread
from lln_study.paper.figures.questions import main

DRAWS = 20
BLOCK = 128
ROWS = 64  # of a matrix, evenly spaced


def concentration_rows() -> Iterator[Row]:
    """Entropy of rows and share of near keys under one normaliser, beside softmax."""
    for tokens in (512, 4096):
        for head_dim in (16, 32, 64, 128):
            for temperature in (0.5, 1.0, 2.0):
                found: dict[str, list[float]] = {"entropy_difference": [], "share_difference": []}
                shares = []
                for draw in range(DRAWS):
                    variance = temperature**-2
                    q, k = gaussian(tokens, head_dim, seed=draw, score_variance=variance)
                    soft, joint, near = _rows_of_both(q, k)
                    found["entropy_difference"].append(_bits(joint) - _bits(soft))
                    share = (soft * near).sum(-1).mean().item()
                    shares.append(share)
                    found["share_difference"].append((joint * near).sum(-1).mean().item() - share)
                row: Row = {"tokens": tokens, "head_dim": head_dim, "temperature": temperature}
                for name, values in (*found.items(), ("share", shares)):
                    row |= spread(name, values)
                row["largest_entropy_difference"] = max(map(abs, found["entropy_difference"]))
                yield row


def _rows_of_both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Evenly spaced rows of softmax's matrix and of the joint one, and which keys are near."""
    tokens, scale = q.shape[2], q.shape[3] ** -0.5
    alpha, beta = moments.measure_scales(q, k, method="entropy")
    gamma = moments.match_level(q, k, alpha=alpha, beta=beta, near=BLOCK)
    index = torch.arange(0, tokens, max(1, tokens // ROWS))
    near = reference.near_field(tokens, tokens, Near(BLOCK))[0, 0][index]
    exact = reference.softmax_scores(q[:, :, index], k, scale=scale)[0, 0]
    linear = reference.lln_scores(q[:, :, index], k, alpha=alpha, beta=beta)[0, 0] + gamma[0, 0]
    joint = torch.where(near, exact, linear)
    return exact.softmax(-1), joint.softmax(-1), near


def _bits(p: Tensor) -> float:
    return -(p * p.clamp(min=1e-300).log2()).sum(-1).mean().item()


def retrieval_rows() -> Iterator[Row]:
    """Queries that are copies of keys anywhere: how often LLN's largest weight is on the target."""
    tokens, head_dim = 512, 64
    _, k = gaussian(tokens, head_dim, seed=0)
    target = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    q = k[:, :, target]
    scores = reference.softmax_scores(q, k, scale=head_dim**-0.5)[0, 0]
    yield {"slots": None, "feature_map": "softmax", "found": _share_found(scores, target)}
    alpha, beta = (x.double() for x in moments.measure_scales(q, k, method="entropy"))
    for family in ("rotations", "signs"):
        for multiple in (1, 2, 4, 8, 16):
            if family == "signs" and multiple == 1:
                continue
            slots = multiple * head_dim
            maps = first_map(family, head_dim, slots).double()
            factor = slot_factor(family, head_dim, slots, 1.0)
            linear = reference.lln_scores(
                q @ maps, k @ maps, alpha=factor * alpha, beta=factor * beta
            )[0, 0]
            yield {"slots": slots, "feature_map": family, "found": _share_found(linear, target)}


def _share_found(scores: Tensor, target: Tensor) -> float:
    return (scores.argmax(-1) == target).double().mean().item()


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "concentration": concentration_rows,
    "retrieval": retrieval_rows,
}


if __name__ == "__main__":
    main(TABLES, "near-far")
