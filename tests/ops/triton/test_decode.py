"""Single-token decoding: merging with the state of the token and reading, in one launch."""

from __future__ import annotations

import pytest
import torch

from lln.ops import eager
from lln.ops import triton as kernels
from tests.helpers import relative_error
from tests.ops.triton.compare import inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_equals_merge_and_read(dtype, device):
    given = inputs(3, 4, 6, None, 48, 32, key_heads=2, device=device)
    q, k, v = (given[n].to(dtype) for n in ("q", "k", "v"))
    alpha, beta = given["alpha"].float(), given["beta"].float()
    mask = torch.rand(3, 6, device=device) > 0.3
    mask[0, :2] = False  # the state of this sample is empty at first
    empty = k[:, :, :0], v[:, :, :0]
    state = kernels.summarize(*empty, beta=beta)
    exact = eager.summarize(*(x.double() for x in empty), beta=beta.double())
    for t in range(6):
        now = slice(t, t + 1)
        token = {"beta": beta, "key_mask": mask[:, now]}
        out, *state = kernels.decode(
            q[:, :, now], k[:, :, now], v[:, :, now], *state, alpha=alpha, **token
        )
        token["beta"] = beta.double()
        added = eager.summarize(k[:, :, now].double(), v[:, :, now].double(), **token)
        exact = eager.merge(*exact, *added)
        expected = eager.read(q[:, :, now].double(), *exact, alpha=alpha.double())
        assert out.dtype == dtype
        assert relative_error(out, expected) < 4 * torch.finfo(dtype).eps
        seen = exact[0].isfinite()
        assert torch.equal(state[0].isfinite(), seen)
        assert relative_error(state[0][seen], exact[0][seen]) < 1e-6
        assert relative_error(state[1], exact[1]) < 1e-6


def test_masked_content_never_matters(device):
    given = {n: x.float() for n, x in inputs(1, 2, 1, device=device).items()}
    state = kernels.summarize(given["k"], given["v"], beta=given["beta"])
    hidden = {n: torch.full_like(given[n], torch.nan) for n in ("k", "v")}
    mask = torch.zeros(1, 1, dtype=torch.bool, device=device)
    out, *after = kernels.decode(
        **{**given, **hidden}, log_mass=state[0], mean=state[1], key_mask=mask
    )
    torch.testing.assert_close(after[1], state[1])
    torch.testing.assert_close(out, kernels.read(given["q"], *state, alpha=given["alpha"]))
