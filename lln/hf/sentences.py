"""Load a SentenceTransformer whose encoder was saved after :func:`lln.hf.replace`."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils import logging

from lln.hf.saving import check_safe, load


def load_sentence_transformer(folder: str | PathLike[str], **options: Any) -> Any:
    """``SentenceTransformer(folder)`` with the attention its encoder was saved with.

    A plain ``SentenceTransformer(folder)`` stops with an error on such a folder. As with
    :func:`lln.hf.load` nothing of the folder is run.

    Args:
        folder: Written by ``model.save_pretrained(folder)`` of a SentenceTransformer after
            ``lln.hf.replace(model[0].auto_model, ...)``.
        options: Those of SentenceTransformer, such as ``device`` and ``model_kwargs``.

    Example:
        >>> model = SentenceTransformer("all-MiniLM-L6-v2")
        >>> lln.hf.replace(model[0].auto_model, "lln_nearfar")
        >>> model.save_pretrained("minilm-lln")
        >>> model = lln.hf.load_sentence_transformer("minilm-lln")
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:  # pragma: no cover
        raise ImportError(
            "load_sentence_transformer needs sentence-transformers; install it with: "
            "pip install sentence-transformers"
        ) from error
    place = _encoder_folder(Path(folder))
    given = dict(options.pop("model_kwargs", None) or {})
    check_safe(place, {**options, **given})
    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()  # that softmax has no use for the weights of LLN
        softmax = {**given, "attn_implementation": "sdpa", "use_safetensors": True}
        model = SentenceTransformer(str(folder), model_kwargs=softmax, **options)
    finally:
        logging.set_verbosity(verbosity)
    first: Any = model[0]
    before = first.auto_model
    encoder = load(place, type(before), **given).to(before.device)
    for name, part in list(first.named_children()):
        if part is before:
            setattr(first, name, encoder.train(before.training))
    return model


def _encoder_folder(folder: Path) -> Path:
    """Where the files of a SentenceTransformer's first module are."""
    modules = folder / "modules.json"
    if not modules.is_file():
        raise ValueError(
            f"{folder} has no modules.json, so that no SentenceTransformer was saved there; use "
            "lln.hf.load for a model of transformers"
        )
    first = min(json.loads(modules.read_text(encoding="utf-8")), key=lambda entry: entry["idx"])
    return folder / first["path"]
