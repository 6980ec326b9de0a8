"""Generated recall, and the key heads that it is found with."""

from __future__ import annotations

import pytest
import torch

import lln.hf
from lln.hf.conversion.keep import best_first
from lln.hf.conversion.retrieval import (
    TASKS,
    Recall,
    Task,
    can_retrieve,
    losses,
    recall,
    tasks_for,
    worth_of_key_heads,
)
from tests.hf.conversion.planted import HEAD, LAYER, WIDTH, WORDS, planted
from tests.hf.tiny import make, text

NEAR = lln.Near(8, overlap=8, sinks=1, joint=True)
OPTIONS = {"near": NEAR, "feature_map": "learned", "slots": 16}


def converted(model, tokens: int = 120):
    lln.hf.replace(model, "lln_nearfar", quiet=True, **OPTIONS)
    words = torch.randint(1, model.config.vocab_size, (2, tokens))
    lln.hf.calibrate(model, [{"input_ids": words}])
    return model


@pytest.mark.parametrize("task", [*TASKS.values(), Task(1, 3, 2)])
def test_what_is_asked_was_said_once_beyond_the_window(task):
    beyond, vocabulary = 30, torch.arange(5, 405)
    found = recall(task, vocabulary, start=[2], beyond=beyond, length=160, count=3, seed=1)
    pieces = (160 - 1 - beyond) // (2 * task.size)
    assert found.ids.shape == (3, 1 + 2 * pieces * task.size + beyond)
    assert len(found.asked) == pieces * task.answer and found.beyond == beyond
    assert found.ids[:, 0].eq(2).all() and found.ids[:, 1:].ge(5).all()
    said = found.ids[:, 1 : 1 + pieces * task.size].unfold(1, task.size, task.size)
    again = found.ids[:, -pieces * task.size :].unfold(1, task.size, task.size)
    for row in range(3):
        assert sorted(said[row].tolist()) == sorted(again[row].tolist()) != again[row].tolist()
        assert len(said[row, :, 0].unique()) == pieces
        for place in found.asked.tolist():
            offset = (place - 1 - pieces * task.size - beyond) % task.size
            assert task.cue <= offset < task.cue + task.answer
            first = (said[row, :, 0] == found.ids[row, place - offset]).nonzero().item()
            told = 1 + first * task.size + offset
            assert found.ids[row, told] == found.ids[row, place] and place - told >= beyond
    same = recall(task, vocabulary, start=[2], beyond=beyond, length=160, count=3, seed=1)
    other = recall(task, vocabulary, start=[2], beyond=beyond, length=160, count=3, seed=2)
    assert same.ids.equal(found.ids) and not other.ids.equal(found.ids)


def test_the_loss_is_of_the_tokens_that_are_asked_for():
    model, ids = make("llama"), text(2, 30)
    asked = Recall(ids, torch.tensor([11, 12, 25]), 0)
    logits = model(ids).logits.log_softmax(-1)
    wanted = torch.stack([-logits[:, n - 1].gather(1, ids[:, n, None])[:, 0] for n in (11, 12, 25)])
    torch.testing.assert_close(losses(model, asked), wanted.mean(0))
    assert [one.ids.tolist() for one in asked.one_by_one()] == [[row] for row in ids.tolist()]


def test_a_planted_head_is_found_and_all_parts_add_up_to_the_loss():
    model = planted().train()
    sizes = {"length": 120, "count": 2}
    exact = model.state_dict(keep_vars=True)
    softmax = planted()
    converted(model)
    found = worth_of_key_heads(model, **sizes, points=16)
    assert best_first(found)[0] == (LAYER, HEAD)
    others = [x for layer in (0, 1) for n, x in enumerate(found[layer]) if (layer, n) != (1, HEAD)]
    assert found[LAYER][HEAD] > 5 * max(map(abs, others))
    assert model.training and all(x.equal(model.state_dict()[n]) for n, x in exact.items())
    tasks = tasks_for(model.eval(), **sizes)
    with torch.no_grad():
        lost = [(losses(model, x) - losses(softmax, x)).mean().item() for x in tasks.values()]
    assert min(lost) > 1
    assert sum(map(sum, found.values())) == pytest.approx(sum(lost) / 2, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "recalls"), [(None, True), ("error", False)])
def test_the_kept_head_retrieves_after_conversion(order, recalls):
    model, softmax = planted(), planted()
    data = [{"input_ids": torch.randperm(WORDS - 1)[None, :60] + 1} for _ in range(3)]
    with torch.no_grad():  # a head that looks far away for nothing has the largest error
        first = model.model.layers[0].self_attn
        for weight, own in ((first.q_proj, 2), (first.k_proj, 1), (first.v_proj, 1)):
            weight.weight[own * WIDTH :] *= 300
        first.o_proj.weight[:, 2 * WIDTH :] = 0
    softmax.load_state_dict(model.state_dict())
    done = lln.hf.convert(
        model, data, options=OPTIONS, transfer_steps=2, recover_steps=0, keep=1, keep_by=order
    )
    kept = {LAYER: [HEAD]}
    assert (done.kept_key_heads == kept) == recalls and done.key_heads == 4
    assert set(done.scores) == ({"retrieval", "error"} if recalls else {"error"})
    asked = tasks_for(model, length=120)["needles"]
    with torch.no_grad():
        lost = (losses(model, asked) - losses(softmax, asked)).mean().item()
    assert lost < 0.5 if recalls else lost > 1


def test_who_can_be_asked_and_with_how_much_room():
    assert can_retrieve(make("llama")) and can_retrieve(make("gpt2"))
    assert not can_retrieve(make("bert"))
    assert not can_retrieve(make("bart", head="AutoModelForSeq2SeqLM"))
    with pytest.raises(ValueError, match=r"length=20 has no room.*give at least 43 tokens"):
        recall(TASKS["needles"], torch.arange(50), beyond=11, length=20, count=1)
    model = converted(make("llama"), 60)
    assert tasks_for(model)["pairs"].ids.shape[1] <= 128  # as many as it has positions
    assert tasks_for(model)["pairs"].beyond == NEAR.keys(True)
    assert not any(x.ids[:, 1:].eq(0).any() for x in tasks_for(model).values())  # padding
