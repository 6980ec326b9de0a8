"""On a GPU: the numbers of the CPU, no hidden waiting for the device, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from lln.moments import match_moments, measure_scales, score_variance, standard_deviations
from tests.helpers import never_waiting, random_qkv

pytestmark = pytest.mark.gpu
VARIANTS = [("paper", False), ("variance", False), ("entropy", False), ("entropy", True)]


@pytest.fixture
def inputs():
    q, k, _ = random_qkv(2, 4, 300, 200, 64, key_heads=2, dtype=torch.float32)
    masks = {"key_mask": torch.rand(2, 200) > 0.3, "query_mask": torch.rand(2, 300) > 0.3}
    return 1.5 * q + 1, k - 2, masks


def on_gpu(q, k, masks):
    return q.cuda(), k.cuda(), {name: mask.cuda() for name, mask in masks.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_match_the_cpu(inputs, dtype):
    q, k, masks = inputs
    q, k = q.to(dtype), k.to(dtype)
    q[0, 0, ~masks["query_mask"][0]] = float("nan")
    gpu_q, gpu_k, gpu_masks = on_gpu(q, k, masks)
    got = [
        *standard_deviations(gpu_q, gpu_k, **gpu_masks),
        score_variance(gpu_q, gpu_k, **gpu_masks),
    ]
    expected = [*standard_deviations(q, k, **masks), score_variance(q, k, **masks)]
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS)
def test_calibration_matches_the_cpu_and_never_waits(inputs, method, normalize_keys):
    options = {"method": method, "normalize_keys": normalize_keys}
    q, k, masks = on_gpu(*inputs)
    measure_scales(q, k, **masks, **options)  # compiles kernels
    with never_waiting():
        got = measure_scales(q, k, **masks, **options)
    expected = measure_scales(*inputs[:2], **inputs[2], **options)
    for x, y in zip(got, expected, strict=True):
        assert x.is_cuda
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS)
def test_captured_in_a_cuda_graph(method, normalize_keys):
    def scales(sigma):
        return match_moments(sigma, sigma, 64, method=method, normalize_keys=normalize_keys)

    sigma = torch.tensor([0.5, 1.0], device="cuda")
    scales(sigma)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alpha, _ = scales(sigma)
    sigma.mul_(1.5)
    graph.replay()
    torch.testing.assert_close(alpha, scales(sigma)[0])


def test_autocast_changes_nothing(inputs):
    q, k, masks = on_gpu(*inputs)
    plain = score_variance(q, k, **masks)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(score_variance(q, k, **masks), plain)
