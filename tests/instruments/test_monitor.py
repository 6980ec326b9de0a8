"""The monitor: right values, nothing disturbed, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lln import instruments
from lln.instruments import MEASURES, monitor
from tests.instruments import models
from tests.instruments.training import encoder, loss_of, of_heads, of_steps, roberta, train

DEFAULTS = {"entropy", "effective_tokens", "column_bias", "temperature", "log_variance"}


MODELS = {
    "roberta": roberta,
    "eager roberta": lambda: roberta(attention="eager"),
    "gpt2": lambda: models.build("gpt2", head="causal"),
    "encoder": encoder,
    "lln encoder": lambda: encoder(statistics="running", near=4, dropout=0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_identical(name, tmp_path):
    """Same losses, weights and random numbers after three steps with dropout, evaluation too."""
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        model = MODELS[name]().train()
        if watched:
            measures = ("entropy", "spectral_gap", "log_variance")
            with monitor(model, every=2, measures=measures, path=tmp_path / "rows.jsonl") as rows:
                losses = train(model, 3)
                model.eval()
                with torch.no_grad():
                    losses.append(loss_of(model))
            assert {row["step"] for row in rows} == {0, 2}
        else:
            losses = train(model, 3)
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model))
        results.append((*losses, *model.state_dict().values(), torch.rand(3)))
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)


def test_values_are_those_of_the_true_matrix():
    model = roberta(attention="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.randint(5, 100, (3, 20))
    names = [name for name in MEASURES if name not in ("entropy_se", "temperature")]
    with monitor(model.train(), every=1, measures=names, rows=20, samples=3) as rows:
        attentions = model(input_ids=ids, output_attentions=True).attentions
    rows = of_heads(rows)
    assert len(rows) == 2 * 4
    for row in rows:
        p = attentions[row["layer"]][:, row["head"]]
        for name in names:
            expected = getattr(instruments, name)(p).mean().item()
            assert row[name] == pytest.approx(expected, abs=1e-5, rel=1e-4), name


def test_rows_have_their_place_and_statistics():
    model = roberta()
    with monitor(model, every=2) as rows:
        train(model, 3)
    heads = of_heads(rows)
    places = [(row["step"], row["layer"], row["head"]) for row in heads]
    assert places == [(s, l, h) for s in (0, 2) for l in range(2) for h in range(4)]
    first = heads[0]
    assert first["module"] == "roberta.encoder.layer.0.attention.self"
    assert (first["kernel"], first["causal"], first["tokens"]) == ("softmax", False, 20)
    assert set(first) == {
        *("step", "layer", "module", "head", "kernel", "causal", "tokens"),
        *("sigma_q", "sigma_k"),
        *DEFAULTS,
    }
    assert all(isinstance(first[name], float) for name in DEFAULTS)


def test_alpha_beta_and_shares_of_lln():
    model = encoder(near=4)
    x = torch.randn(3, 10, 32)
    with monitor(model, every=1) as rows:
        model(x)
    attention = model.layers[0].self_attn
    q, k, _ = attention._project(x, x, x)
    sigma_q, sigma_k = q[0].std((-2, -1), correction=0), k[0].std((-2, -1), correction=0)
    alpha, beta = attention.attention.statistics(q, k)
    for row in of_heads(rows)[:4]:
        head = row["head"]
        assert row["kernel"] == "lln"
        assert row["sigma_q"] == pytest.approx(sigma_q[head].item(), rel=1e-4)
        assert row["sigma_k"] == pytest.approx(sigma_k[head].item(), rel=1e-4)
        assert row["alpha"] == pytest.approx(alpha[0, head].item())
        assert row["beta"] == pytest.approx(beta[0, head].item())
        assert 0 < row["lln_share"] < 1
        assert row["lln_share"] + row["diag_share"] == pytest.approx(1)


def test_gradient_norm_and_loss_scale():
    class Scaler:
        def get_scale(self) -> float:
            return 8.0

    model = encoder()
    with monitor(model, every=1, scaler=Scaler()) as rows:
        (8 * loss_of(model)).backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    expected = torch.stack(squares).sum().sqrt().item() / 8
    (row,) = of_steps(rows)
    assert row["gradient_norm"] == pytest.approx(expected, rel=1e-5)
    assert (row["step"], row["loss_scale"]) == (0, 8.0) and row["seconds"] > 0


def test_a_step_without_a_backward_pass_has_no_gradient():
    model = encoder()
    with monitor(model, every=1) as rows:
        loss_of(model)
        loss_of(model).backward()
    assert [row["gradient_norm"] is None for row in of_steps(rows)] == [True, False]


def test_evaluation_does_not_count():
    model = encoder()
    with monitor(model, every=1) as rows:
        loss_of(model)
        model.eval()
        loss_of(model)
        model.train()
        with torch.no_grad():
            loss_of(model)
        loss_of(model)
    assert sorted({row["step"] for row in rows}) == [0, 1]
    assert len(of_heads(rows)) == 2 * 2 * 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.encoder, self.reentrant = encoder(), reentrant

    def forward(self, x):
        for layer in self.encoder.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_no_double_rows(reentrant):
    model = Checkpointed(reentrant)
    with monitor(model, every=1) as rows:
        for _ in range(2):
            model(torch.randn(3, 10, 32, requires_grad=True)).square().mean().backward()
    assert len(of_heads(rows)) == 2 * 2 * 4
    assert all(row["gradient_norm"] > 0 for row in of_steps(rows))


def test_a_checkpointed_model_is_one_step():
    model = encoder()
    with monitor(model, every=1) as rows:
        x = torch.randn(3, 10, 32, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert {row["step"] for row in rows} == {0}
    assert len(of_heads(rows)) == 2 * 4


def hooks_of(model: nn.Module) -> list[dict]:
    names = [name for name in vars(model) if name.endswith("_hooks")]
    assert "_forward_hooks" in names
    kept = [dict(vars(module)[name]) for module in model.modules() for name in names]
    return kept + [dict(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]


@pytest.mark.parametrize("where", ["body", "forward"])
def test_every_hook_is_removed_after_an_exception(where):
    model = roberta()
    before = hooks_of(model)
    with pytest.raises((RuntimeError, IndexError)), monitor(model, every=1) as rows:
        loss_of(model)
        assert hooks_of(model) != before
        if where == "forward":
            model(input_ids=torch.tensor([[1000]]))  # beyond the vocabulary
        raise RuntimeError("inside")
    assert hooks_of(model) == before
    assert len(of_heads(rows)) == 2 * 4
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_copy_of_the_model_is_not_watched():
    model = encoder()
    with monitor(model, every=1) as rows:
        loss_of(copy.deepcopy(model))
    assert rows == []


def test_overflow_does_not_end_the_run():
    model = encoder()
    with monitor(model, every=1) as rows, pytest.warns(UserWarning, match="layer 0 .* not finite"):
        model(torch.full((2, 5, 32), torch.inf))
    assert all(row["entropy"] is None for row in of_heads(rows)) and len(of_heads(rows)) == 8


def test_autocast_and_half_precision():
    model = encoder()
    with monitor(model, every=1) as rows, torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(3, 10, 32)
        model(x)
    assert all(0 < row["entropy"] <= 3.33 for row in of_heads(rows))


def test_only_rank_zero_measures(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        model = encoder()
        with monitor(model, every=1) as rows:
            loss_of(model)
        assert bool(rows) == (rank == 0)


def test_a_model_without_attention_is_told():
    model = nn.Linear(4, 4)
    with monitor(model) as rows, pytest.warns(UserWarning, match="saw no attention .* of Linear"):
        model(torch.randn(2, 4))
    assert of_heads(rows) == []


def test_functions_may_name_the_measures():
    model = encoder()
    wanted = [instruments.entropy, "spectral_gap"]
    with monitor(model, every=1, measures=wanted) as rows:
        loss_of(model)
    assert {"entropy", "spectral_gap"} <= set(rows[0]) and "log_variance" not in rows[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"measures": "entropy"}, TypeError, r"pass a list, \['entropy'\]"),
        ({"measures": ["gap"]}, ValueError, r"measures has \['gap'\]; choose from entropy"),
        ({"samples": 1.5}, TypeError, "samples is a float"),
    ],
)
def test_bad_options_are_explained(options, error, message):
    model = encoder()
    with pytest.raises(error, match=message), monitor(model, **options):
        pass
    assert not any(hooks_of(model))


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(TypeError, match="model is a function"), monitor(F.relu):  # pyright: ignore
        pass
    compiled = torch.compile(encoder(), backend="eager")
    with pytest.raises(ValueError, match="is compiled"), monitor(compiled):  # pyright: ignore
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["roberta", "lln encoder"])
def test_on_a_gpu_the_rows_are_those_of_the_cpu(name):
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = MODELS[name]().to(device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        torch.manual_seed(2)
        x = torch.randn(3, 40, 32) if name != "roberta" else torch.randint(5, 100, (3, 40))
        with monitor(model, every=1) as rows:
            model(x.to(device))
        found[device] = of_heads(rows)
    assert found["cuda"][0]["layer"] == 0
    for ours, theirs in zip(found["cpu"][:4], found["cuda"][:4], strict=True):
        for measure in DEFAULTS | {"sigma_q", "sigma_k"}:
            assert ours[measure] == pytest.approx(theirs[measure], rel=2e-3, abs=1e-4), measure
