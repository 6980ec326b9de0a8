"""LLN+Diag with blocks of more than a tile and with windows that overlap: one family of kernels."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from lln.ops.common.kernels import tiles
from lln.ops.window import lln_diag as lln_diag_op
from lln.ops.window.kernels.blocks.wide_launch import _regular
from tests.helpers import windowed
from tests.ops.triton.compare import compare, inputs

lln_diag = windowed(lln_diag_op.lln_diag)

HALF = torch.float16


def learned(heads: int, device: str) -> torch.Tensor:
    return torch.rand(heads, dtype=torch.float64, device=device)


@pytest.mark.parametrize(
    "length, block, overlap",
    [(256, 128, 0), (200, 128, 0), (200, 96, 32), (256, 128, 64), (130, 256, 0), (100, 24, 8)],
)
def test_average(length, block, overlap, device):
    tensors = inputs(1, 2, length, width=32, device=device)
    window = {"block": block, "overlap": overlap, "scale": 0.2}
    compare(kernels.lln_diag, reference.lln_diag, tensors, HALF, **window)


@pytest.mark.parametrize(
    "tokens, window, whole, alike",
    [
        (256, (128, 0), True, True),
        (192, (128, 0), True, False),  # the last block is half of one
        (256, (128, 64), True, False),  # the first window begins before the first key
        (200, (128, 0), False, False),
        (192, (96, 0), False, False),
        (256, (128, 32), False, False),
    ],
)
def test_which_tiles_are_whole_and_which_windows_alike(tokens, window, whole, alike):
    assert _regular(64, 64, tokens, (*window, 0.2)) == (whole, alike)


@pytest.mark.parametrize("length, block, overlap", [(200, 96, 32), (256, 128, 0), (150, 64, 16)])
def test_groups_masks_learned_mix(length, block, overlap, device):
    """Among the samples one whose last window sees nothing."""
    tensors = inputs(2, 2, length, None, 48, 16, key_heads=1, device=device)
    tensors["mix"] = learned(2, device)
    mask = torch.rand(2, length, device=device) > 0.3
    mask[1, length // 2 :] = False
    window = {"block": block, "overlap": overlap, "scale": 0.2}
    compare(kernels.lln_diag, reference.lln_diag, tensors, HALF, **window, key_mask=mask)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale, device):
    tensors = inputs(1, 1, 140, width=16, device=device)
    compare(kernels.lln_diag, reference.lln_diag, tensors, HALF, block=128, scale=scale)


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_one_branch_has_all_the_weight(mix, device):
    tensors = inputs(1, 1, 140, width=16, device=device)
    tensors["mix"] = torch.full((1,), mix, dtype=torch.float64, device=device)
    compare(kernels.lln_diag, reference.lln_diag, tensors, HALF, floor=0.01, block=128, scale=0.2)


@pytest.mark.parametrize("block", [16, 128])
def test_one_weight_for_all_heads(block, device):
    given = {n: x.to(HALF if n in "qkv" else torch.float32) for n, x in
             inputs(1, 3, 70, width=16, device=device).items()}  # fmt: skip
    mix = torch.tensor(0.3, device=device)
    results = [
        kernels.lln_diag(**given, mix=x, block=block, scale=0.2)
        for x in (mix.expand(3), mix.repeat(3))
    ]
    assert torch.equal(*results)


def test_wide_heads(device):
    tensors = inputs(1, 2, 100, None, 128, 32, key_heads=1, device=device)
    mask = torch.rand(1, 100, device=device) > 0.3
    tensors["mix"] = learned(2, device)
    compare(kernels.lln_diag, reference.lln_diag, tensors, HALF, block=64, scale=0.1, key_mask=mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax_of_large_blocks_alone(is_causal, device):
    tensors = inputs(1, 2, 200, None, 16, 32, key_heads=1, device=device)
    tensors = {n: x for n, x in tensors.items() if n in ("q", "k", "v")}
    mask = torch.rand(1, 200, device=device) > 0.3
    compare(
        kernels.block_diagonal, reference.block_diagonal, tensors, HALF,
        block=128, scale=0.3, key_mask=mask, is_causal=is_causal,
    )  # fmt: skip


def test_causal_branches_of_large_blocks(device):
    tensors = inputs(1, 1, 150, width=16, device=device)
    options = {"block": 128, "scale": 0.2, "is_causal": True}
    compare(kernels.lln_diag, reference.lln_diag, tensors, HALF, **options)


def test_masked_content_never_matters(device):
    tensors = inputs(2, 1, 160, width=16, device=device)
    mask = torch.rand(2, 160, device=device) > 0.5
    mask[1] = False
    given = {n: x.to(HALF if n in "qkv" else torch.float32) for n, x in tensors.items()}
    hidden = ~mask[:, None, :, None]
    poisoned = {
        n: x.masked_fill(hidden, torch.nan) if n in ("k", "v") else x for n, x in given.items()
    }
    results = []
    for case in (given, poisoned):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        out = kernels.lln_diag(**leaves, block=96, overlap=16, scale=0.2, key_mask=mask)
        results.append((out, *torch.autograd.grad(out.float().sum(), list(leaves.values()))))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
        assert clean.isfinite().all()
    assert (results[0][0][1] == 0).all()


def half_arguments(device: str) -> tuple:
    shapes = (2, 2, 70, 16), (2, 1, 70, 16), (2, 1, 70, 16)
    q, k, v = (torch.randn(s, device=device, dtype=HALF).requires_grad_() for s in shapes)
    alpha, beta, mix = (torch.rand(s, device=device) for s in ((2, 2), (2, 1), (2,)))
    mask = torch.rand(2, 70, device=device) > 0.3
    return q, k, v, alpha, beta, mix.requires_grad_(), mask, 32, 16, 0.2


def test_the_operator_keeps_its_promises(device):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.lln.lln_diag_train.default
    torch.library.opcheck(operator, half_arguments(device), test_utils=utilities)


def test_compile_keeps_the_op_whole(device):
    q, k, v, alpha, beta, mix, mask, block, overlap, scale = half_arguments(device)
    options = {"block": block, "overlap": overlap, "scale": scale, "key_mask": mask}

    def attend(q, k, v, mix):
        return kernels.lln_diag(q, k, v, alpha=alpha, beta=beta, mix=mix, **options).tanh()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = [f(q, k, v, mix) for f in (attend, compiled)]
    torch.testing.assert_close(*found)
    gradients = [torch.autograd.grad(x.float().sum(), (q, k, v, mix)) for x in found]
    torch.testing.assert_close(*gradients)


# Of a GPU: whole windows with and without masks, edges, wide heads, groups.
@pytest.mark.parametrize("length", [512, 2048, 4096, 16_384, 65_536])
@pytest.mark.parametrize(
    "kernel, merged", [("wide", False), ("wide_loop", False), ("wide_dq", True)]
)
def test_programs_fill_the_device(kernel, merged, length, monkeypatch):
    """65,536 tokens, 12 heads, 132 multiprocessors: hardly longer than if all were busy."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    tile, heads = tiles.HALF[kernel][64], 12 * 65_536 // length
    options = {"merged": merged, "program": tiles.DIAG_PROGRAM}
    parts, span = tiles.split.__wrapped__(length, heads, tile, torch.device("cpu"), **options)
    slots = 132 * tile.programs
    rounds = -(-parts * heads // slots)
    assert rounds * span <= 1.05 * length * heads / slots


def in_linear_memory(q, k, v, **given) -> torch.Tensor:
    """Plain PyTorch in float64: the definition would keep tens of gigabytes for its gradient."""
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    return lln_diag(q.double(), k.double(), v.double(), **wide, impl="eager").to(q.dtype)


def test_plain_pytorch_is_the_definition():
    tensors = inputs(2, 2, 200, key_heads=1, device="cpu")
    window = {"block": 96, "overlap": 32, "scale": 0.2}
    found, wanted = (f(**tensors, **window) for f in (in_linear_memory, reference.lln_diag))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


WINDOWS = [(128, 0), (256, 0), (128, 64), (64, 64), (96, 32), (512, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length, masked", [(640, False), (640, True), (600, False)])
@pytest.mark.parametrize("block, overlap", WINDOWS)
def test_windows_on_a_gpu(block, overlap, length, masked, dtype, width, device):
    tensors = inputs(2, 4, length, width=width, key_heads=2, device=device)
    tensors["mix"] = learned(4, device)
    mask = torch.rand(2, length, device=device) > 0.2 if masked else None
    window = {"block": block, "overlap": overlap, "scale": width**-0.5}
    compare(
        kernels.lln_diag, reference.lln_diag, tensors, dtype, floor=0.1, **window, key_mask=mask
    )


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("block, overlap", WINDOWS)
def test_averages_on_a_gpu(block, overlap, width, group, device):
    """Many heads, so that a program has several tiles and the next one loads ahead."""
    tensors = inputs(2, 16, 1024, width=width, key_heads=16 // group, device=device)
    window = {"block": block, "overlap": overlap, "scale": width**-0.5}
    compare(kernels.lln_diag, in_linear_memory, tensors, torch.bfloat16, floor=0.1, **window)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("block, overlap", WINDOWS)
def test_the_same_bits_on_every_run(block, overlap, width, device):
    tensors = inputs(8, 12, 2048, width=width, device=device)
    half = {n: x.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, x in tensors.items()}
    half["mix"] = learned(12, device).float()
    found = []
    for _ in range(3):
        leaves = {n: x.clone().requires_grad_() for n, x in half.items()}
        out = kernels.lln_diag(**leaves, block=block, overlap=overlap, scale=width**-0.5)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))))
    assert all(
        torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True)
    )
