"""Decode many streams in steps of fixed shapes, captured as a CUDA graph where there is a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from lln.device.capture import captured
from lln.hf.cache import use_states
from lln.hf.decode.memory import empty_like
from lln.hf.serving.choice import drawn, likeliest
from lln.hf.serving.layers import Layers, longest_stream
from lln.hf.serving.seat_layer import SeatLayer, cache_of, tensors_of
from lln.hf.serving.stream import Choice, Stream


class Engine:
    """A model that decodes for a fixed number of seats; streams come and go.

    A prompt is read by itself, and its state copied into a free seat; a step then gives every
    stream one token. Its tensors are allocated here and never move, its shapes depend on nothing,
    and it waits for the device only to read the tokens. On a GPU a step is a CUDA graph. The tokens
    of a stream are those of ``model.generate`` for its prompt alone, whatever its neighbours are,
    up to rounding.

    Args:
        model: A decoder after :func:`lln.hf.replace`, calibrated, in evaluation mode. Its weights
            may not change while it serves.
        seats: Streams at the same time.
        max_length: The longest stream, prompt included. Needed where layers or heads keep softmax:
            their keys are allocated for it. Without it streams of constant memory have no end
            but that of learned positions.
        graph: Whether a step is captured; None means on a GPU.

    Raises:
        ValueError: The model cannot decode in steps of fixed shapes; the message names the layer.

    Example:
        >>> engine = lln.hf.Engine(model, seats=8)
        >>> stream = engine.add([1, 15, 7], max_new_tokens=20)
        >>> while not stream.ended:
        ...     for stream, token in engine.step(): ...
    """

    def __init__(
        self,
        model: Any,
        seats: int,
        *,
        max_length: int | None = None,
        graph: bool | None = None,
    ) -> None:
        for name, value in (("seats", seats), ("max_length", max_length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} is a {type(value).__name__}; pass an int")
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be positive")
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() first")
        self.model, self.seats = model, seats
        self._layers = Layers.of(model)
        self.max_length = longest_stream(model, self._layers, max_length)
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        if graph and not on_gpu:
            raise ValueError(f"graph=True, but the model is on {self.device}; leave graph out")
        self._capture = on_gpu if graph is None else graph
        self._replays: dict[bool, Callable[[], None]] = {}
        self.streams: list[Stream | None] = [None] * seats
        self._allocate(seats)

    @torch.no_grad()
    def _allocate(self, seats: int) -> None:
        """Make all tensors of a step, with sizes and dtypes as one token of a prompt gives them."""
        self.position = torch.zeros(seats, dtype=torch.long, device=self.device)
        self.tokens, self.live = self.position.clone(), self.position.bool()
        one, logits = self._read(torch.zeros(1, dtype=torch.long))
        self._nothing = [empty_like(tensors, 1) for tensors in one]
        self.layers = [
            SeatLayer(core, empty_like(tensors, seats), self.position)
            for core, tensors in zip(self._layers.cores, one, strict=True)
        ]
        self._cache = cache_of(self.layers)
        self._choice = Choice.empty(seats, logits.shape[-1], self.device)

    def add(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Stream:
        """Read a prompt and give it a seat; its first token comes with the next :meth:`step`.

        Args:
            prompt: Token ids, ``[N]`` or ``[1, N]``.
            max_new_tokens: The stream ends after so many.
            eos_token_id: The stream ends with one of these; None means those of the model's
                ``generation_config``, and ``()`` none.
            do_sample: Draw tokens, as ``generate`` does after ``torch.manual_seed(seed)`` with the
                same temperature, top_k and top_p; each stream has a generator of its own.

        Raises:
            ValueError: An option is wrong, the stream would be too long, or no seat is free.
        """
        if self.free == 0:
            raise ValueError(
                f"all {self.seats} seats are taken; call step() until a stream has ended, end(), "
                "or make the engine with more seats"
            )
        ids = self._ids(prompt)
        stream = Stream(
            ids.tolist(),
            self.streams.index(None),
            max_new_tokens,
            self._ends(eos_token_id),
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        total = len(ids) + max_new_tokens
        if self.max_length is not None and total > self.max_length:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens} are {total}, "
                f"and streams have at most max_length={self.max_length}"
            )
        self._seat(stream, ids)
        return stream

    @torch.no_grad()
    def _seat(self, stream: Stream, ids: Tensor) -> None:
        found = self._read(ids[:-1])[0] if len(ids) > 1 else self._nothing
        for layer, tensors in zip(self.layers, found, strict=True):
            layer.copy_(stream.seat, tensors)
        self.position[stream.seat] = len(ids) - 1
        self.tokens[stream.seat] = stream.prompt[-1]
        self.live[stream.seat] = True
        self._choice.seat(stream)
        self.streams[stream.seat] = stream

    @torch.no_grad()
    def step(self) -> list[tuple[Stream, int]]:
        """One more token of every stream, in the order of the seats; streams that end leave."""
        streams = [stream for stream in self.streams if stream is not None]
        if not streams:
            return []
        self._move(sampled=self._choice.draw_noise(streams))
        tokens, found = self.tokens.tolist(), []
        for stream in streams:
            token = tokens[stream.seat]
            stream.read(token)
            found.append((stream, token))
            if stream.ended:
                self._leave(stream.seat)
        return found

    def end(self, stream: Stream) -> None:
        """Take a stream from its seat; the tokens it has stay with it."""
        if self.streams[stream.seat] is not stream:
            raise ValueError(f"the stream is not in seat {stream.seat}: it has ended")
        stream.ended = "taken"
        self._leave(stream.seat)

    def generate(self, prompts: Iterable[Sequence[int] | Tensor], **options: Any) -> list[Stream]:
        """All streams of these prompts, ended; a seat goes to the next prompt when it is free.

        ``options`` are those of :meth:`add`; streams that are in their seats already go on, too.
        """
        waiting, streams = list(prompts), []
        while waiting or not all(stream.ended for stream in streams):
            while waiting and self.free:
                streams.append(self.add(waiting.pop(0), **options))
            self.step()
        return streams

    @property
    def free(self) -> int:
        """Seats without a stream."""
        return self.streams.count(None)

    @property
    def nbytes(self) -> int:
        """Bytes that the seats hold."""
        return sum(x.nbytes for layer in self.layers for x in layer.tensors.values())

    def _leave(self, seat: int) -> None:
        """An empty seat goes on with token 0 at position 0, which nobody reads."""
        self.streams[seat] = None
        for buffer in (self.position, self.tokens, self.live):
            buffer[seat] = 0

    def _move(self, *, sampled: bool) -> None:
        """One step of all seats, by a captured graph if there is to be one."""
        if not self._capture:
            return self._forward(sampled=sampled)
        if sampled not in self._replays:
            # To capture is to run, and what ran must not count.
            kept = [x.clone() for x in self._moved()]
            self._replays[sampled] = captured(functools.partial(self._forward, sampled=sampled))
            for own, before in zip(self._moved(), kept, strict=True):
                own.copy_(before)
        return self._replays[sampled]()

    def _forward(self, *, sampled: bool) -> None:
        """Tensors in, tensors out: what a graph holds."""
        out = self.model(
            input_ids=self.tokens[:, None],
            position_ids=self.position[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits = out.logits[:, -1].float()
        found = drawn(logits, **self._choice.options) if sampled else likeliest(logits)
        if sampled:
            found = torch.where(self._choice.sampled, found, likeliest(logits))
        self.tokens.copy_(torch.where(self.live, found, 0))
        self.position.add_(self.live)

    def _moved(self) -> list[Tensor]:
        own = [self.tokens, self.position]
        return own + [x for layer in self.layers for x in layer.tensors.values()]

    def _read(self, ids: Tensor) -> tuple[list[dict[str, Tensor]], Tensor]:
        """What each layer remembers of a prompt, as one row of its seats, and the logits."""
        cache = DynamicCache(config=self.model.config)
        use_states(cache, self._layers.modules)
        place = torch.arange(len(ids), device=self.device)[None]
        given = {"input_ids": ids[None].to(self.device), "position_ids": place}
        out = self.model(**given, past_key_values=cache, use_cache=True)
        both = zip(cache.layers, self._layers.cores, strict=True)
        return [tensors_of(x, core, self.max_length or 0) for x, core in both], out.logits

    def _ids(self, prompt: Sequence[int] | Tensor) -> Tensor:
        ids = torch.as_tensor(prompt).cpu()
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(
                f"prompt has shape {list(ids.shape)} and dtype {ids.dtype}; pass the token ids of "
                "one text, at least one"
            )
        most = self._choice.vocabulary
        if int(ids.min()) < 0 or int(ids.max()) >= most:
            raise ValueError(
                f"prompt holds ids from {ids.min()} to {ids.max()}, not in [0, {most})"
            )
        return ids.long()

    def _ends(self, given: int | Sequence[int] | None) -> tuple[int, ...]:
        if given is None:
            given = getattr(self.model.generation_config, "eos_token_id", None)
        if given is None:
            return ()
        return (given,) if isinstance(given, int) else tuple(given)
