"""One thread inside the block, as many as before after it."""

from __future__ import annotations

import pytest
import torch

from lln.device.threads import one_thread


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_come_back_even_after_an_error(three_threads):
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ArithmeticError), one_thread():
        raise ArithmeticError
    assert torch.get_num_threads() == 3
