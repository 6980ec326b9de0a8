"""What ``lln convert`` was asked for."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lln.hf import CacheShare

Row = dict[str, Any]
CALIBRATION = 4  # batches from which α, β and γ are measured
# Of recovery where weights begin anew: 2e-5 would leave them nearly as they were drawn.
SCRATCH_RATE = 5e-4


@dataclass(frozen=True)
class Settings:
    """What ``lln convert`` was asked for.

    Attributes:
        model: Folder of a softmax model.
        data: Text to learn from: a file, or a folder with files per split; None looks at
            ``LLN_DATA``, then takes the text that comes with the package.
        out: Folder of the converted model and its report.
        length: Tokens of a sequence; default 512 for encoders, 2,048 for decoders.
        options: Of the attention; they change single ones of :func:`lln.hf.convert`.
        keep: How many key heads keep softmax, or how large a cache they may make.
        keep_by: What a key head is worth, "retrieval" or "error"; default by the kind of model.
        from_scratch: Draw the weights anew instead of taking those of the model, which is then the
            teacher alone: the rival that every conversion has to beat at as many tokens. It has no
            transfer, for there is no trained softmax in its layers, and all of its weights learn.
        held_out: File of text to be judged by; default the files for validation, or the end.
        judge_articles: Held-out articles that judge.
        cost_length: Most tokens at which time and memory are measured; 0 for not at all.
        results: Folder whose conversion.jsonl gets a row.
        transfer_options, recover_options: Arguments of :func:`lln.hf.transfer` and
            :func:`lln.hf.recover`, such as ``learning_rate``; from scratch 5e-4 in recovery.

    Raises:
        ValueError: A rate is not positive, or ``from_scratch`` stands beside what it excludes.
    """

    model: Path
    data: Path | None
    out: Path
    length: int | None = None
    batch_size: int = 2
    attention: str = "lln_nearfar"
    options: Mapping[str, Any] = field(default_factory=dict)
    transfer_steps: int = 300
    recover_steps: int = 100
    keep: int | CacheShare = 0
    keep_by: str | None = None
    held_out: Path | None = None
    judge_articles: int = 200
    cost_length: int | None = None
    results: Path | None = None
    device: str | None = None
    precision: str = "fp32"
    seed: int = 0
    transfer_options: Mapping[str, Any] = field(default_factory=dict)
    recover_options: Mapping[str, Any] = field(default_factory=dict)
    from_scratch: bool = False

    def __post_init__(self) -> None:
        for stage in ("transfer", "recover"):
            rate = getattr(self, f"{stage}_options").get("learning_rate")
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(
                    f"--{stage}-rate {rate} is not positive; leave it out for the usual"
                )
        if self.from_scratch:
            self._check_scratch()
            options = {"learning_rate": SCRATCH_RATE, **self.recover_options}
            object.__setattr__(self, "recover_options", options)

    def _check_scratch(self) -> None:
        if self.transfer_steps:
            raise ValueError(
                f"--transfer-steps {self.transfer_steps} with --from-scratch: layers with freshly "
                "drawn weights have no trained softmax to imitate; leave it out, and give "
                "--recover-steps as many updates as the conversion it is compared with has in all"
            )
        if self.keep:
            asked = "--memory" if isinstance(self.keep, CacheShare) else f"--keep {self.keep}"
            raise ValueError(
                f"{asked} with --from-scratch: freshly drawn weights have no softmax worth "
                "keeping; leave it out"
            )

    def decisive(self) -> Row:
        """Those that decide the weights and how they are judged, as JSON holds them."""
        fields = dataclasses.asdict(self)
        for name in ("out", "results", "cost_length", "device"):
            del fields[name]
        if not self.from_scratch:  # as it was before there was the choice
            del fields["from_scratch"]
        return json.loads(json.dumps(fields, default=str))
