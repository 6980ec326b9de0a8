"""What must hold for every stream of a Hugging Face model, and for every conversion of one.

Streams: copies of a cache, and padding. Conversions: mixes, adapters, dtypes, and kills.

`make fuzz` runs the same properties with more cases each (HYPOTHESIS_PROFILE=fuzz).
"""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import Tensor
from transformers import DynamicCache

import lln.hf
from lln.hf.cache import StateLayer, use_states
from lln.onnx import DecoderStep
from tests.hf.test_families import GROUPED, model_of
from tests.hf.tiny import TEXT, VOCABULARY, make

MECHANISMS = {
    "lln": {},
    "lln_diag": {"near": 3},
    "lln_diag with conv": {"near": 4, "conv": 3},
    "lln_diag with weights": {"near": lln.Near(3, overlap=2), "mix": [0.1, 0.4, 0.6, 0.9]},
    "lln_nearfar": {"near": lln.Near(3, overlap=2, sinks=1)},
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
    options = {"near": lln.Near(3, overlap=window), "mix": [0.5] * 4, "alpha": 1.3, "beta": 0.8}
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


MIXES = {
    "joint": ("lln_nearfar", {"slots": 16}),
    "learned": ("lln_diag", {"mix": "learned", "learn_scale": True}),
    "average": ("lln_diag", {"learn_scale": True}),
    "far alone": ("lln", {"learn_scale": True}),
}


@dataclass(frozen=True)
class Conversion:
    """A conversion of a tiny decoder."""

    dtype: torch.dtype
    adapter: bool
    lora: int
    mix: str
    short_windows: float
    killed: tuple[str, int]
    seed: int

    def model(self):
        """A softmax model, tuned by an adapter that matters if it has one."""
        model = model_of("llama", {**GROUPED, "num_hidden_layers": 1}).eval()
        generator = torch.Generator().manual_seed(self.seed)
        for name, x in model.named_parameters():
            if x.dim() == 2:
                factor = 8 if "q_proj" in name or "k_proj" in name else 3
                x.data = factor * 0.02 * torch.randn(x.shape, generator=generator)
        model = model.to(self.dtype)
        if self.adapter:
            config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
            model.add_adapter(config)
            for name, x in model.named_parameters():
                if "lora_" in name:
                    x.data = 0.2 * torch.randn(x.shape, generator=generator)
        return model

    def batches(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [{"input_ids": torch.randint(3, VOCABULARY, (2, 24), generator=generator)}]

    def convert(self, model, folder, progress=None):
        attention, options = MIXES[self.mix]
        options = options if attention == "lln" else {**options, "near": 4}
        fixed = {} if attention == "lln_nearfar" else {"statistics": "fixed"}
        return lln.hf.convert(
            model, self.batches(), attention=attention, options={**options, **fixed},
            calibration=1, transfer_steps=4, recover_steps=4, folder=folder, progress=progress,
            recover_options={
                "lora": self.lora, "short_windows": self.short_windows, "learning_rate": 1e-4,
            },
        )  # fmt: skip


conversions = st.builds(
    Conversion,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    adapter=st.booleans(),
    lora=st.sampled_from([0, 2]),
    mix=st.sampled_from(sorted(MIXES)),
    short_windows=st.sampled_from([0.0, 0.5]),
    killed=st.tuples(st.sampled_from(["transfer", "recover"]), st.integers(1, 4)),
    seed=st.integers(0, 2**31),
)


@torch.no_grad()
def distance(model, other, batch) -> float:
    ours, theirs = (x(**batch).last_hidden_state.float() for x in (model, other))
    return ((ours - theirs).norm() / theirs.norm()).item()


# A case converts three times.
@pytest.mark.slow
@settings(max_examples=max(4, settings.default.max_examples // 10))
@given(conversions)
def test_conversion_keeps_dtype_and_adapters_and_goes_on_after_a_kill(case):
    """It comes closer to the tuned model, and ends in the same weights after a kill."""
    softmax, batch = case.model(), case.batches()[0]
    dtypes = {name: x.dtype for name, x in softmax.state_dict().items()}

    def kill(stage, step, steps, value):
        if (stage, step) == case.killed:
            raise KeyboardInterrupt

    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("lln.hf.conversion.convert.EVERY", 2)
        model = case.model()
        torch.manual_seed(0)
        done = case.convert(model, f"{folder}/whole")
        stopped = case.model()
        torch.manual_seed(0)
        with pytest.raises(KeyboardInterrupt):
            case.convert(stopped, f"{folder}/killed", kill)
        assert distance(stopped, softmax, batch) == 0  # given back
        torch.manual_seed(0)
        case.convert(stopped, f"{folder}/killed")

    found, again = model.state_dict(), stopped.state_dict()
    assert found.keys() == again.keys()
    assert all(x.equal(again[name]) for name, x in found.items())
    assert all(found[name].dtype == dtype for name, dtype in dtypes.items())
    assert all(x.isfinite().all() for x in found.values())
    assert model(**batch).last_hidden_state.dtype == case.dtype
    if case.adapter:
        assert model.active_adapters() == ["default"] and list(model.peft_config) == ["default"]
    if case.lora:  # what the user's adapter learned is part of the answer, and not touched
        wanted = softmax.state_dict()
        assert all(x.equal(wanted[name]) for name, x in found.items() if ".lora_" in name)
    first, *_, last = (row["loss"] for row in done.curves["recover"])
    assert case.short_windows or last < first
