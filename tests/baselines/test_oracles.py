"""Mechanisms against independent packages with equal weights, to float32 rounding.

Where a package departs from the method, the test says how and compares what is comparable. The
packages come with the ``dev`` extra; a missing one skips its tests.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.baselines.small import DIM, HEADS, heads, make, padded

CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def package(name: str) -> ModuleType:
    """Import quietly: some of these packages use what newer versions of torch deprecate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}")


def copy_(ours: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        ours.weight.copy_(weight)
        ours.bias.copy_(torch.zeros_like(ours.bias) if bias is None else bias)


def copy_qkv_(module: Any, theirs: tuple[nn.Linear, ...]) -> None:
    for ours, other in zip(
        (module.query, module.key, module.value, module.out), theirs, strict=True
    ):
        copy_(ours, other.weight, other.bias)


class TestPerformer:
    """performer-pytorch takes no key mask in its attention: a padded sample is compared cut."""

    def oracle(self, core) -> Any:
        module = package("performer_pytorch").FastAttention(DIM // HEADS, nb_features=32)
        module.projection_matrix.copy_(core.projection)
        return module

    def test_output_and_gradients(self):
        core = make("performer").core
        theirs = self.oracle(core)
        tensors = [x.requires_grad_() for x in heads(50, dtype=torch.float32)]
        outs = [run(*tensors) for run in (core, theirs)]
        torch.testing.assert_close(*outs, **CLOSE)
        up = torch.randn_like(outs[0])
        ours, other = (torch.autograd.grad(out, tensors, up) for out in outs)
        for a, b in zip(ours, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)

    def test_padding_equals_cutting(self):
        core = make("performer").core
        q, k, v = heads(50, dtype=torch.float32)
        mask = torch.arange(50).expand(2, -1) < 31
        expected = self.oracle(core)(q, k[:, :, :31], v[:, :, :31])
        torch.testing.assert_close(core(q, 7 * k, v, mask), core(q, 7 * k[:, :, :31], v[:, :, :31]))
        torch.testing.assert_close(core(q, k, v, mask), expected, **CLOSE)

    def test_default_number_of_features(self):
        theirs = package("performer_pytorch").FastAttention(64)
        ours = make("performer", dim=128, num_features=None).core
        assert ours.projection.shape == theirs.projection_matrix.shape == (266, 64)


class TestNystromformer:
    """nystrom-attention starts its inverse from one norm over batch and heads; ours per matrix.

    The start does not change the limit: with iterations to convergence both agree. It pads at the
    front to a multiple of the landmarks, so lengths are compared where nothing has to be padded.
    """

    def oracle(self, module, iterations: int) -> Any:
        theirs = package("nystrom_attention").NystromAttention(
            DIM,
            dim_head=DIM // HEADS,
            heads=HEADS,
            num_landmarks=8,
            pinv_iterations=iterations,
            residual_conv_kernel=5,
        )
        q, k, v = theirs.to_qkv.weight.chunk(3)
        for ours, weight in ((module.query, q), (module.key, k), (module.value, v)):
            copy_(ours, weight, None)
        copy_(module.out, theirs.to_out[0].weight, theirs.to_out[0].bias)
        with torch.no_grad():
            module.core.conv.copy_(theirs.res_conv.weight)
        return theirs

    def test_converged(self):
        module = make("nystromformer", iterations=14)
        theirs = self.oracle(module, 14)
        x = 3 * torch.randn(2, 48, DIM)
        with torch.no_grad():
            torch.testing.assert_close(module(x), theirs(x), rtol=1e-3, atol=1e-4)

    def test_six_iterations_on_one_head_and_sample(self):
        """Where the batch is one matrix the starts are equal, and so is everything."""
        module = make("nystromformer", num_heads=1, dim=16, kernel_size=0)
        theirs = package("nystrom_attention").NystromAttention(
            16, dim_head=16, heads=1, num_landmarks=8, residual=False
        )
        q, k, v = theirs.to_qkv.weight.chunk(3)
        for ours, weight in ((module.query, q), (module.key, k), (module.value, v)):
            copy_(ours, weight, None)
        copy_(module.out, theirs.to_out[0].weight, theirs.to_out[0].bias)
        x = 3 * torch.randn(1, 48, 16)
        with torch.no_grad():
            torch.testing.assert_close(module(x), theirs(x), **CLOSE)

    def test_their_batch_leaks_and_ours_does_not(self):
        module = make("nystromformer")
        theirs = self.oracle(module, 6)
        x = torch.randn(2, 48, DIM)
        loud = torch.cat([x[:1], 20 * x[1:]])
        with torch.no_grad():
            assert (theirs(x)[:1] - theirs(loud)[:1]).abs().max() > 1e-4
            torch.testing.assert_close(module(x)[:1], module(loud)[:1])


class TestLinformer:
    @pytest.mark.parametrize("tokens", [257, 100])
    def test_output(self, tokens):
        module = make("linformer")
        theirs = package("linformer").LinformerSelfAttention(DIM, 257, k=8, heads=HEADS)
        copy_qkv_(module, (theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out))
        with torch.no_grad():
            module.core.key_projection.copy_(theirs.proj_k.T)
            module.core.value_projection.copy_(theirs.proj_v.T)
        x = torch.randn(2, tokens, DIM)
        torch.testing.assert_close(module(x), theirs(x), **CLOSE)


class TestReformer:
    """reformer-pytorch with the two switches that make it the paper's method.

    By default it attends across buckets and counts a pair once per round; both are simplifications
    of its own. Its first chunk wraps around to the last, which the bucket mask makes harmless.
    """

    def test_output(self):
        chunk, rounds, tokens = 8, 3, 96
        theirs = (
            package("reformer_pytorch")
            .LSHAttention(
                bucket_size=chunk,
                n_hashes=rounds,
                allow_duplicate_attention=False,
                attend_across_buckets=False,
            )
            .eval()
        )
        module = make("reformer", max_length=tokens)
        torch.manual_seed(5)
        rotations = torch.randn(1, 16, rounds, tokens // chunk // 2)  # their next random numbers
        with torch.no_grad():
            module.rotations.copy_(rotations[0].transpose(0, 1))
        qk, v = torch.randn(2, 3, HEADS, tokens, 16)
        torch.manual_seed(5)
        expected, *_ = theirs(qk.flatten(0, 1), v.flatten(0, 1))
        got = module._attend(qk, v, torch.ones(3, tokens, dtype=torch.bool))
        torch.testing.assert_close(got.flatten(0, 1), expected, rtol=1e-4, atol=1e-5)


class TestLongformer:
    """transformers' Longformer, which wants lengths that are multiples of the window."""

    def oracle(self, module) -> Any:
        longformer = package("transformers.models.longformer.modeling_longformer")
        configuration = package("transformers").LongformerConfig(
            hidden_size=DIM, num_attention_heads=HEADS, attention_window=[8]
        )
        theirs = longformer.LongformerSelfAttention(configuration, layer_id=0).eval()
        copy_qkv_(module, (theirs.query, theirs.key, theirs.value, identity_linear()))
        for ours, other in (
            (module.global_query, theirs.query_global),
            (module.global_key, theirs.key_global),
            (module.global_value, theirs.value_global),
        ):
            copy_(ours, other.weight, other.bias)
        return theirs

    @pytest.mark.parametrize("lengths", [[48, 48], [48, 29]])
    def test_output(self, lengths):
        module = make("longformer")
        theirs = self.oracle(module)
        x = torch.randn(2, 48, DIM)
        mask = torch.arange(48) < torch.tensor(lengths)[:, None]
        is_global = torch.zeros(2, 48, dtype=torch.bool)
        is_global[:, :2] = True
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected = theirs(
                x,
                attention_mask=torch.where(is_global, 10_000.0, bias),
                is_index_masked=~mask,
                is_index_global_attn=is_global,
                is_global_attn=True,
            )[0]
            got = module(x, mask)
        torch.testing.assert_close(got[mask], expected[mask], **CLOSE)


def identity_linear() -> nn.Linear:
    linear = nn.Linear(DIM, DIM)
    copy_(linear, torch.eye(DIM), None)
    return linear


class TestFlash:
    """FLASH-pytorch holds norm and residual inside; the global part is divided by padding, too."""

    def oracle(self, module) -> Any:
        theirs = package("flash_pytorch").FLASH(
            dim=DIM, group_size=16, query_key_dim=8, norm_klass=lambda _: nn.Identity()
        )
        value, gate = theirs.to_hidden[0].weight.chunk(2)
        value_bias, gate_bias = theirs.to_hidden[0].bias.chunk(2)
        copy_(module.value, value, value_bias)
        copy_(module.gate, gate, gate_bias)
        copy_(module.shared, theirs.to_qk[0].weight, theirs.to_qk[0].bias)
        copy_(module.out, theirs.to_out.weight, theirs.to_out.bias)
        with torch.no_grad():
            nn.init.normal_(theirs.qk_offset_scale.gamma)
            nn.init.normal_(theirs.qk_offset_scale.beta)
            theirs.rel_pos_bias.relative_attention_bias.weight.mul_(0.1)
            module.gamma.copy_(theirs.qk_offset_scale.gamma)
            module.beta.copy_(theirs.qk_offset_scale.beta)
            table = theirs.rel_pos_bias.relative_attention_bias.weight[:, 0]
            module.bias.copy_(table * 8**0.5)  # they scale by √s at every call
        return theirs

    @pytest.mark.parametrize("tokens", [64, 50])
    def test_output(self, tokens):
        module = make("flash")
        theirs = self.oracle(module)
        x = torch.randn(2, tokens, DIM)
        torch.testing.assert_close(module(x), theirs(x) - x, rtol=1e-4, atol=1e-5)

    def test_padding_equals_cutting(self):
        """Their N counts the padding; cut, both agree."""
        module = make("flash")
        theirs = self.oracle(module)
        x, mask = padded(60)
        cut = int(mask[1].sum())
        expected = theirs(x[1:, :cut]) - x[1:, :cut]
        torch.testing.assert_close(module(x, mask)[1:, :cut], expected, rtol=1e-4, atol=1e-5)
        leaky = (theirs(x, mask=mask) - x)[1:, :cut]
        assert (leaky - expected).abs().max() > 1e-3

    @pytest.mark.parametrize("distance", [1, 8, 40, 200])
    def test_position_buckets(self, distance):
        from lln.baselines.flash import t5_bucket

        bias = package("flash_pytorch.flash_pytorch").T5RelativePositionBias
        offset = torch.tensor([-distance, 0, distance])
        expected = bias._relative_position_bucket(offset, causal=False)
        assert t5_bucket(offset).tolist() == expected.tolist()


class TestBlockDiag:
    def test_local_attention_without_neighbours(self):
        theirs = package("local_attention").LocalAttention(
            8, causal=False, look_backward=0, look_forward=0, use_rotary_pos_emb=False
        )
        core = make("block_diag").core
        q, k, v = heads(48, dtype=torch.float32)
        mask = torch.arange(48) < torch.tensor([[48], [30]])
        expected = theirs(q, k, v, mask=mask.repeat_interleave(HEADS, 0))
        got = core(q, k, v, mask)
        torch.testing.assert_close(got[0], expected[0], **CLOSE)
        # A block without a visible key: 0 here, the mean of hidden values there.
        torch.testing.assert_close(got[1, :, :32], expected[1, :, :32], **CLOSE)
        assert (got[1, :, 32:] == 0).all() and expected[1, :, 32:].abs().max() > 0


class TestSlidingWindow:
    def test_longformer_without_global_tokens(self):
        longformer = package("transformers.models.longformer.modeling_longformer")
        configuration = package("transformers").LongformerConfig(
            hidden_size=DIM, num_attention_heads=HEADS, attention_window=[8]
        )
        theirs = longformer.LongformerSelfAttention(configuration, layer_id=0).eval()
        module = make("sliding_window")
        copy_qkv_(module, (theirs.query, theirs.key, theirs.value, identity_linear()))
        x = torch.randn(2, 48, DIM)
        none = torch.zeros(2, 48, dtype=torch.bool)
        with torch.no_grad():
            expected = theirs(
                x,
                attention_mask=torch.zeros(2, 48),
                is_index_masked=none,
                is_index_global_attn=none,
                is_global_attn=False,
            )[0]
            torch.testing.assert_close(module(x), expected, **CLOSE)


class TestSoftmax:
    def test_multihead_attention_of_torch(self):
        theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True).eval()
        module = make("softmax")
        for ours, weight, bias in zip(
            (module.query, module.key, module.value),
            theirs.in_proj_weight.chunk(3),
            theirs.in_proj_bias.chunk(3),
            strict=True,
        ):
            copy_(ours, weight, bias)
        copy_(module.out, theirs.out_proj.weight, theirs.out_proj.bias)
        x, mask = padded(40)
        expected, _ = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)
        torch.testing.assert_close(module(x, mask)[mask], expected[mask], **CLOSE)
