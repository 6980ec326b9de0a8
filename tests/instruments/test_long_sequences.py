"""Long sequences: linear memory for LLN, no N×N array for softmax. Minutes, hence slow.

Peak memory is that of a fresh process, so that nothing measured before counts.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lln.instruments import measure
from tests.instruments.matrices import gaussian, softmax

SCRIPT = """
import json, resource, time
import torch
from lln.instruments import measure

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.manual_seed(0)
q, k = torch.randn(1, 1, {tokens}, 64), torch.randn(1, 1, {tokens}, 64)
measure(q[:, :, :64], k[:, :, :64], {options})       # libraries and thread pools are loaded
before, start = peak(), time.perf_counter()
found = measure(q, k, {options})
seconds = time.perf_counter() - start
print(json.dumps({{"gap": found.spectral_gap.item(), "mb": peak() - before, "s": seconds}}))
"""


def run(tokens: int, options: str) -> dict[str, float]:
    script = SCRIPT.format(tokens=tokens, options=options)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_gap_of_lln_at_65536_tokens_needs_less_than_200_mb():
    found = run(65536, "kernel='lln', alpha=2.0, beta=2.0, measures=['spectral_gap']")
    assert found["mb"] < 200
    assert 0.9 < found["gap"] < 1


@pytest.mark.slow
def test_everything_but_the_full_entropy_of_lln_at_65536_tokens():
    found = run(65536, "kernel='lln', alpha=2.0, beta=2.0, rows=256")
    assert found["mb"] < 200
    assert 0.9 < found["gap"] < 1


@pytest.mark.slow
def test_gap_of_softmax_at_6144_tokens_needs_no_square_array():
    found = run(6144, "measures=['spectral_gap']")
    assert found["mb"] < 6144**2 * 4 / 2**20, "an N×N array in float32 takes 144 MB"
    assert 0.97 < found["gap"] < 1


@pytest.mark.slow
def test_long_softmax_equals_the_matrix():
    from lln import instruments

    q, k = gaussian(2048, 64)
    found = measure(q, k)
    p = softmax(q, k)
    for name in ("entropy", "spectral_gap", "centred_singular_value", "mutual_information"):
        expected = getattr(instruments, name)(p)
        assert getattr(found, name).item() == pytest.approx(expected.item(), abs=5e-5), name
