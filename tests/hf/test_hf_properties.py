"""What must hold for every stream of a Hugging Face model: copies of its cache, and its padding.

`make fuzz` runs the same properties with more cases each (HYPOTHESIS_PROFILE=fuzz).
"""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

import lln.hf
from lln.hf.cache import StateLayer, use_states
from lln.onnx import DecoderStep
from tests.hf.test_families import GROUPED, model_of
from tests.hf.tiny import TEXT, VOCABULARY, make

MECHANISMS = {
    "lln": {},
    "lln_diag": {"diag_block": 3},
    "lln_diag with conv": {"diag_block": 4, "conv": 3},
    "lln_diag with weights": {"diag_block": 3, "diag_overlap": 2, "mix": [0.1, 0.4, 0.6, 0.9]},
    "lln_nearfar": {"diag_block": 3, "diag_overlap": 2, "sinks": 1},
}
FAMILIES = {"llama": GROUPED, "nomic_bert": TEXT, "eurobert": GROUPED}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # in float64; rotations are computed in float32
# A case runs a model up to twenty times, some tens of milliseconds.
few = settings(max_examples=max(10, settings.default.max_examples // 5))


@functools.cache
def made(family: str, name: str, statistics: str = "fixed"):
    """A model of one layer, made once."""
    model = model_of(family, {**FAMILIES[family], "num_hidden_layers": 1})
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() == 2 else 1)
    scales = {"alpha": 1.3, "beta": 0.8} if statistics == "fixed" else {}
    options = {**MECHANISMS[name], **scales, "statistics": statistics}
    lln.hf.replace(model, name.split()[0], quiet=True, **options)
    return model.double()


@dataclass(frozen=True)
class Stream:
    """Rows of tokens behind different amounts of padding, read in pieces, copied in between."""

    seed: int
    padding: list[int]
    pieces: list[int]
    copied_after: int
    copied_by: str
    name: str

    def tokens(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (len(self.padding), self.length), generator=generator)

    @property
    def length(self) -> int:
        return sum(self.pieces)

    def mask(self) -> Tensor:
        """Padding on the left, and a token in seven left out further on."""
        generator = torch.Generator().manual_seed(self.seed)
        place, padding = torch.arange(self.length), torch.tensor(self.padding)[:, None]
        holes = torch.rand(len(padding), self.length, generator=generator) < 1 / 7
        return (place == padding) | ((place > padding) & ~holes)


streams = st.builds(
    Stream,
    seed=st.integers(0, 2**31),
    padding=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    pieces=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    copied_after=st.integers(1, 4),
    copied_by=st.sampled_from(sorted(COPIES)),
    name=st.sampled_from(sorted(MECHANISMS)),
)


@torch.no_grad()
def read(model, cache, ids: Tensor, mask: Tensor, pieces: list[int]) -> Tensor:
    """Outputs of the next tokens of a stream, in pieces."""
    outputs = []
    for piece in pieces:
        start = cache.get_seq_length()
        end = start + piece
        arguments = {"attention_mask": mask[:, :end], "past_key_values": cache}
        outputs.append(model(input_ids=ids[:, start:end], **arguments).last_hidden_state)
    return torch.cat(outputs, 1)


@few
@given(streams)
def test_a_copied_cache_and_its_original_go_on_alone(stream):
    """Two continuations of one prefix, in any pieces: each equals a single pass over its tokens."""
    model, mask = made("llama", stream.name), stream.mask()
    at = min(stream.copied_after, len(stream.pieces) - 1)
    before, after = stream.pieces[:at], stream.pieces[at:]
    ids, other = stream.tokens(stream.seed), stream.tokens(stream.seed + 1)
    other[:, : sum(before)] = ids[:, : sum(before)]
    cache = DynamicCache(config=model.config)
    use_states(cache, list(model.modules()))
    prefix = read(model, cache, ids, mask, before)
    assert isinstance(cache.layers[0], StateLayer)
    twin = COPIES[stream.copied_by](cache)
    for past, tokens in ((cache, ids), (twin, other)):
        got = torch.cat([prefix, read(model, past, tokens, mask, after)], 1)
        with torch.no_grad():
            whole = model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        torch.testing.assert_close(got[mask], whole[mask], **CLOSE)


@functools.cache
def served(window: int):
    """A decoder of one layer with a weight for each head, and its step in seats."""
    model = make("llama", num_hidden_layers=1).double()
    options = {"diag_block": 3, "diag_overlap": window, "mix": [0.5] * 4, "alpha": 1.3, "beta": 0.8}
    lln.hf.replace(model, "lln_diag", quiet=True, **options)
    return model


@few
@given(
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.sampled_from([0, 2]),
    st.integers(1, 12),
    st.integers(0, 2**31),
)
@torch.no_grad()
def test_seats_and_states_keep_the_weight_of_every_head(mix, window, tokens, seed):
    """A stream read token by token in seats, as engine and graph do, and from states."""
    model = served(window)
    model.model.layers[0].self_attn.lln.fixed_mix.copy_(torch.tensor(mix))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=generator)
    whole = model(ids, use_cache=False).logits
    step, cache = DecoderStep(model), DynamicCache(config=model.config)
    use_states(cache, list(model.modules()))
    state = step.empty(2)
    for place, token in enumerate(ids.unbind(1)):
        logits, *state = step(token, torch.full((2,), place), *state)
        torch.testing.assert_close(logits, whole[:, place], **CLOSE)
        logits = model(token[:, None], past_key_values=cache).logits[:, 0]
        torch.testing.assert_close(logits, whole[:, place], **CLOSE)


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=4)


@few
@given(
    rows,
    st.integers(0, 5),
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(sorted(MECHANISMS)),
    st.booleans(),
)
def test_padding_on_either_side_changes_nothing(rows, behind, family, name, measured):
    """Each row of a batch, with its own padding before and behind, against that row alone."""
    statistics = "sample" if measured and family != "llama" else "fixed"
    if family != "llama" and "conv" in name:
        name = "lln_diag"  # a filter on both sides has an odd width and is drawn anew
    model = made(family, name, statistics)
    width = max(before + length for before, length in rows) + behind
    generator = torch.Generator().manual_seed(width)
    ids = torch.randint(3, VOCABULARY, (len(rows), width), generator=generator)
    place = torch.arange(width)
    mask = torch.stack([(place >= start) & (place < start + length) for start, length in rows])
    with torch.no_grad():
        batch = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        for row, (start, length) in enumerate(rows):
            real = slice(start, start + length)
            alone = model(input_ids=ids[row : row + 1, real]).last_hidden_state[0]
            torch.testing.assert_close(batch[row, real], alone, **CLOSE)
