"""A stream of tokens, and how the streams of all seats choose theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(eq=False)
class Stream:
    """One prompt and what follows it.

    Attributes:
        seat: Where it is, or was.
        tokens: What the model has said so far, the token that ended it included.
        ended: "" as long as it goes on; "eos", "length" (max_new_tokens), or "taken" by ``end``.
    """

    prompt: list[int]
    seat: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int):
            raise TypeError(
                f"max_new_tokens is a {type(self.max_new_tokens).__name__}; pass an int"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be positive")
        if not self.do_sample:
            given = (self.temperature, self.top_k, self.top_p)
            for name, value, plain in zip(
                ("temperature", "top_k", "top_p"), given, (1.0, None, 1.0), strict=True
            ):
                if value != plain:
                    raise ValueError(
                        f"{name}={value} would be ignored: the likeliest token is taken; give "
                        "do_sample=True too"
                    )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"temperature={self.temperature} must be a positive number; leave do_sample out "
                "for the likeliest token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be positive; None takes all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 takes all tokens")

    def read(self, token: int) -> None:
        """Take one more token, and end if it is the last."""
        self.tokens.append(token)
        if token in self.eos_token_ids:
            self.ended = "eos"
        elif len(self.tokens) >= self.max_new_tokens:
            self.ended = "length"


@dataclass(frozen=True)
class Choice:
    """Options and random numbers of all seats, as a step reads them."""

    sampled: Bool[Tensor, " B"]
    noise: Float[Tensor, "B V"]
    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    generators: dict[int, torch.Generator]

    @staticmethod
    def empty(seats: int, vocabulary: int, device: torch.device) -> Choice:
        """Greedy seats."""
        ones = torch.ones(seats, device=device, dtype=torch.float32)
        noise = torch.ones(seats, vocabulary, device=device, dtype=torch.float32)
        top_k = torch.full((seats,), vocabulary, device=device)
        return Choice(ones == 0, noise, ones.clone(), top_k, ones.clone(), {})

    @property
    def vocabulary(self) -> int:
        """Number of tokens there are."""
        return self.noise.shape[1]

    @property
    def options(self) -> dict[str, Tensor]:
        """Arguments of :func:`lln.hf.serving.choice.drawn`."""
        return {
            "noise": self.noise,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }

    def seat(self, stream: Stream) -> None:
        """Let a seat choose as its stream wants, from the start of its random numbers."""
        seat, most = stream.seat, self.vocabulary
        self.sampled[seat] = stream.do_sample
        self.temperature[seat] = stream.temperature
        self.top_k[seat] = most if stream.top_k is None else min(stream.top_k, most)
        self.top_p[seat] = stream.top_p
        self.generators.pop(seat, None)
        if stream.do_sample:
            generator = torch.Generator(self.noise.device)
            self.generators[seat] = generator.manual_seed(stream.seed)

    def draw_noise(self, streams: Sequence[Stream]) -> bool:
        """Draw the numbers of the streams that sample; returns whether there are any."""
        drawing = [stream.seat for stream in streams if stream.do_sample]
        for seat in drawing:
            self.noise[seat].exponential_(1, generator=self.generators[seat])
        return bool(drawing)
