"""A folder of Hugging Face weights as one ONNX file, checked against torch and timed.

Text models: ids and mask in, logits out (hidden states where there is no head).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lln.onnx.export import export

TRACED = 16  # tokens of the inputs that are traced
ALLOWED = 1e-3  # difference from torch, in the largest output
RUNS = 5  # of which the median counts


@dataclass(frozen=True)
class Row:
    """What one length gave: difference from torch in the largest output, milliseconds of a pass."""

    tokens: int
    difference: float
    ms: float
    softmax_ms: float | None


class TextModel(nn.Module):
    """A model of transformers with two inputs and its first output, as its graph has them.

    Args:
        model: After :func:`lln.hf.replace`, in evaluation mode, on a CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits, or hidden states where the model has no head."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def load(
    folder: str | Path, attention: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[TextModel, TextModel]:
    """The model with our attention, and the same weights with softmax.

    Args:
        folder: Saved after ``lln.hf.replace`` or by ``lln convert``, or with ``attention`` any
            model whose attention can be replaced.
        attention, options: As of ``lln.hf.replace``.
    """
    import transformers

    from lln import hf

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **local)
    if not hasattr(config, "vocab_size"):
        raise ValueError(
            f"{folder} holds a {config.model_type} model; only text models are exported"
        )
    named = (config.architectures or ("AutoModel",))[0]
    kind = getattr(transformers, named, transformers.AutoModel)
    local["use_safetensors"] = True
    with _silent(transformers):
        softmax = kind.from_pretrained(folder, attn_implementation="sdpa", **local)
        if attention is None:
            model = hf.load(folder, kind, local_files_only=True)
        else:
            model = kind.from_pretrained(folder, attn_implementation="sdpa", **local)
            hf.replace(model, attention, quiet=True, **(options or {}))
    for each in (model, softmax):
        each.config.use_cache = False
    return TextModel(model).eval(), TextModel(softmax).eval()


def export_model(model: TextModel, file: str | Path) -> None:
    """Write the graph of a model, for any batch and up to as many tokens as it has positions.

    Inputs of the graph are ``input_ids`` and ``attention_mask`` of int64 ``[B, N]``.

    Example:
        >>> lln.onnx.export_model(lln.onnx.TextModel(model.eval()), "model.onnx")
    """
    sizes = torch.export.Dim("batch", max=4096), torch.export.Dim("tokens", min=2, max=most(model))
    shapes = {0: sizes[0], 1: sizes[1]}
    names = ["input_ids", "attention_mask"]
    given = inputs(model, 2, TRACED)
    export(model, given, file, dynamic_shapes=(shapes, shapes), input_names=names)


def most(model: TextModel) -> int:
    """The largest number of tokens that the positions of a model reach."""
    config: Any = model.model.config
    found = getattr(config, "max_position_embeddings", None) or (1 << 20)
    learned = getattr(model.model.base_model, "embeddings", None)
    table = getattr(learned, "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        found = table.num_embeddings - table.padding_idx - 1  # positions begin after padding
    return int(found)


def inputs(model: TextModel, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Seeded ids, and a mask that hides the last quarter of the second sample."""
    config: Any = model.model.config
    generator = torch.Generator().manual_seed(tokens)
    least = min(5, config.vocab_size - 1)  # beyond the ids of padding and its like
    ids = torch.randint(least, config.vocab_size, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, tokens - tokens // 4 :] = 0
    return ids, mask


def check(
    model: TextModel,
    file: str | Path,
    lengths: tuple[int, ...],
    softmax: TextModel | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Run the graph beside torch at each length, and the graph of ``softmax`` for the time."""
    ours, other = session_of(file), None
    with tempfile.TemporaryDirectory() as folder:
        if softmax is not None:
            say("exporting the softmax model for its time")
            other_file = Path(folder) / "softmax.onnx"
            export_model(softmax, other_file)
            other = session_of(other_file)
        for tokens in lengths:
            given = inputs(model, 2, tokens)
            with torch.no_grad():
                expected = model(*given)
            valid = given[1].bool()
            got, (ms, *softmax_ms) = _timed([x for x in (ours, other) if x is not None], given)
            error = (got - expected)[valid].abs().max() / expected[valid].abs().max()
            yield Row(tokens, error.item(), ms, softmax_ms[0] if softmax_ms else None)


def configuration(model: TextModel) -> str:
    """What a row has to say of a model: its sizes and its attention."""
    config: Any = model.model.config
    sizes = (config.model_type, config.num_hidden_layers, config.hidden_size)
    attention = "; ".join(
        " ".join([done["attention"], *(f"{name}={x}" for name, x in done["options"].items())])
        for done in getattr(config, "lln", None) or ()
    )
    words = "{} of {} layers, width {}, {} heads, {}".format(
        *sizes, config.num_attention_heads, attention or "softmax"
    )
    return f"{words}; batch of 2, padded; runs take turns, median of {RUNS}"


def session_of(file: str | Path) -> Any:
    """The graph in onnxruntime, with as many threads as torch has."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "the check runs the graph in onnxruntime; install it with: "
            "pip install 'lln-attention[onnx]', or leave the check out"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _timed(sessions: list[Any], given: tuple[Tensor, ...]) -> tuple[Tensor, list[float]]:
    """The output of the first, and the median milliseconds of a pass of each; they take turns.

    What else the machine does then slows both.
    """
    feed = {entry.name: x.numpy() for entry, x in zip(sessions[0].get_inputs(), given, strict=True)}
    out, *_ = [session.run(None, feed)[0] for session in sessions]
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(RUNS):
        for session, own in zip(sessions, times, strict=True):
            start = time.perf_counter()
            session.run(None, feed)
            own.append(time.perf_counter() - start)
    return torch.from_numpy(out), [1e3 * statistics.median(own) for own in times]


class _silent:
    """Without transformers' progress bars and its words on weights that softmax does not use."""

    def __init__(self, transformers: Any) -> None:
        self.logging = transformers.utils.logging

    def __enter__(self) -> None:
        self.level = self.logging.get_verbosity()
        self.bars = self.logging.is_progress_bar_enabled()
        self.logging.set_verbosity_error()
        self.logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        self.logging.set_verbosity(self.level)
        if self.bars:
            self.logging.enable_progress_bar()
