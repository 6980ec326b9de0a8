"""The model that is pre-trained: what its fresh weights are."""

from __future__ import annotations

import pytest
import torch

from lln_study.data import tokens
from lln_study.tasks import mlm
from lln_study.tasks.models import roberta


def _weights(**changes) -> dict[str, torch.Tensor]:
    config = mlm.configure("roberta-tiny", **changes)
    return roberta.build_model(config, 300)[0].state_dict()


NAME = "roberta.embeddings.position_embeddings.weight"


def test_sinusoids_replace_the_positions_and_nothing_else() -> None:
    drawn, waves = _weights(), _weights(positions="sinusoid")
    assert {name for name in drawn if not torch.equal(drawn[name], waves[name])} == {NAME}
    assert torch.equal(drawn[NAME][: tokens.PAD + 1], waves[NAME][: tokens.PAD + 1])


def test_sinusoids_have_the_size_asked_for_and_put_neighbours_side_by_side() -> None:
    table = _weights(positions="sinusoid", deviation=0.05, length=512)[NAME][tokens.PAD + 1 :]
    assert table.shape[0] == 512
    torch.testing.assert_close(
        table.square().mean(1).sqrt(), torch.full((512,), 0.05), rtol=1e-5, atol=0
    )
    unit = torch.nn.functional.normalize(table, dim=1)
    likeness = unit @ unit.T
    # The same for every pair of the same distance, and falling with it at first.
    for distance in (1, 2, 7):
        diagonal = likeness.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert likeness[0, 1] > likeness[0, 2] > likeness[0, 3] > likeness[0, 7]


def test_unknown_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positions='rotary'.*normal, sinusoid"):
        mlm.configure("roberta-tiny", positions="rotary")
