"""Attention matrices of a trained model: softmax, LLN, LLN+Diag, near and far.

``python -m lln_study.paper.figures.near_far_matrices FOLDER --name MODEL --heads 4.7 3.4`` draws
those of layer 4, head 7 and of layer 3, head 4, and keeps a row for every head: the picture and
the numbers of docs/guide/near-and-far.md. Queries and keys are the model's own, with softmax in
every layer; only the matrix is made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from lln import moments
from lln.device.threads import one_thread
from lln.inspect.model import CannotInspect, load, prepare
from lln.inspect.run import calls_of, read_text
from lln.instruments import entropy
from lln.instruments.recording.attention_call import AttentionCall
from lln.ops import reference
from lln.ops.window.near import Near
from lln.records import machine, saved
from lln.records.rows import Row
from lln.report.matrices import Matrix, matrices

TITLES = ("softmax", "LLN", "LLN+Diag", "near and far")


def forms(
    q: Float[Tensor, "1 H N D"], k: Float[Tensor, "1 H N D"], *, block: int
) -> Float[Tensor, "4 H N N"]:
    """The matrices of :data:`TITLES`, α, β and γ matched to these queries and keys."""
    q, k = q.double(), k.double()
    k = reference.repeat_heads(k, q.shape[1])
    scale = q.shape[-1] ** -0.5
    alpha, beta = moments.measure_scales(q, k, method="entropy")
    gamma = moments.match_level(q, k, alpha=alpha, beta=beta, near=block)
    linear = reference.lln_matrix(q, k, alpha=alpha, beta=beta)
    near = reference.block_diagonal_matrix(q, k, block=block, scale=scale)
    joint = reference.near_far_matrix(
        q, k, q_far=q, k_far=k, alpha=alpha, beta=beta, gamma=gamma, block=block, scale=scale
    )
    softmax = reference.softmax_scores(q, k, scale=scale).softmax(-1)
    return torch.cat([softmax, linear, (linear + near) / 2, joint])


def head_rows(calls: Sequence[AttentionCall], *, block: int) -> Iterator[Row]:
    """A row for each head and form: means over the rows of its matrix.

    ``entropy`` is in bits, ``near_share`` the mass on the keys of a query's block, ``distance`` the
    share of the mass that is elsewhere than softmax's.
    """
    for call in calls:
        found = forms(call.q[:1], call.k[:1], block=block)
        near = reference.near_field(found.shape[2], found.shape[3], Near(block))[0, 0]
        for head in range(call.heads):
            for form, p in zip(TITLES, found[:, head], strict=True):
                yield {
                    "layer": call.layer,
                    "head": head,
                    "form": form,
                    "entropy": entropy(p).mean().item(),
                    "near_share": (p * near).sum(-1).mean().item(),
                    "distance": (p - found[0, head]).abs().sum(-1).mean().item() / 2,
                }


def draw(
    calls: Sequence[AttentionCall],
    rows: Sequence[Row],
    heads: Sequence[tuple[int, int]],
    *,
    block: int,
) -> bytes:
    """Draw a line of four matrices for each (layer, head), with their numbers, as an SVG file."""
    numbers = {(row["layer"], row["head"], row["form"]): row for row in rows}
    lines = []
    for layer, head in heads:
        panels = []
        for form, p in zip(
            TITLES, forms(calls[layer].q[:1], calls[layer].k[:1], block=block)[:, head], strict=True
        ):
            row = numbers[layer, head, form]
            note = f"{row['entropy']:.1f} bits, {row['near_share']:.0%} near"
            if form != "softmax":
                note += f"\n{row['distance']:.0%} of the mass elsewhere"
            panels.append(Matrix(form, p.tolist(), note))
        lines.append((f"layer {layer}, head {head}", panels))
    limits = (0.02 / calls[0].k.shape[2], 0.5)
    scale = "weight of a key in a row"
    return matrices("near-far-matrices", lines, limits=limits, step=block, scale=scale)


def check(calls: Sequence[AttentionCall], heads: Sequence[tuple[int, int]]) -> None:
    """Refuse a model whose matrix is not softmax of q and k alone, and heads it does not have."""
    for call in calls:
        if call.kernel != "softmax" or call.is_causal or call.bias is not None or call.softcap:
            raise CannotInspect(
                f"{call.module} is no plain bidirectional softmax attention; pass an encoder"
            )
    for layer, head in heads:
        if not (0 <= layer < len(calls) and 0 <= head < calls[layer].heads):
            raise CannotInspect(
                f"--heads {layer}.{head} is not there: the model has {len(calls)} layers of "
                f"{calls[0].heads} heads, counted from 0"
            )


def _head(word: str) -> tuple[int, int]:
    layer, _, head = word.partition(".")
    return int(layer), int(head)


def main(words: Sequence[str] | None = None) -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="model with config.json and safetensors")
    parser.add_argument("--heads", type=_head, nargs="+", default=[(0, 0)], help="LAYER.HEAD …")
    parser.add_argument("--text", type=Path, help="UTF-8 file; Tiny Shakespeare if left out")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--block", type=int, default=24, help="positions of a block")
    parser.add_argument("--name", help="of the model, for the rows; that of the folder if left out")
    parser.add_argument("--results", type=Path, default=Path("runs/matrices"))
    given = parser.parse_args(words)
    loaded = load(given.folder)
    inputs = prepare(given.folder, loaded, read_text(given.text), tokens=given.tokens, sequences=1)
    calls = calls_of(loaded, inputs)
    check(calls, given.heads)
    with one_thread():
        facts = machine.facts()
        rows = list(head_rows(calls, block=given.block))
        picture = draw(calls, rows, given.heads, block=given.block)
    about = {
        "model": given.name or given.folder.resolve().name,
        "text": "Tiny Shakespeare" if given.text is None else given.text.name,
        "tokens": calls[0].q.shape[2],
        "block": given.block,
    }
    content = {"rows": [about | row | facts for row in rows]}
    path = saved.save_json(content, given.results, subject="near-far-matrices")
    path.with_suffix(".svg").write_bytes(picture)
    print(f"{path} and .svg, {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
