"""From a prompt to codes: Slow-AR, sampler and Fast-AR in a loop, for one voice or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import as_int, as_prompt
from .sampler import IM_END_ID, Sampler
from .session import MAX_POSITIONS, Output, Session

if TYPE_CHECKING:
    from .fast_ar import Codes, FastAR
    from .model import Model
    from .prefix_cache import PrefixCache

FRAMES_PER_SECOND = 44100 / 2048
"""Of audio: the codec's sampling rate over its hop length, 21.53."""

Finished = Literal["end", "length", "cancelled"]


class Frame(NamedTuple):
    """One frame of a generation."""

    number: int
    """From 0."""
    token: int
    """The semantic token."""
    codes: Codes
    """int32 (n_codebook,)."""


@dataclass
class Timings:
    """Seconds that a generation took, by what they were spent on."""

    prefill: float = 0.0
    slow_ar: float = 0.0
    fast_ar: float = 0.0
    sampling: float = 0.0


@dataclass
class Generation:
    """What a prompt became.

    Attributes
    ----------
    codes
        int32 (n_codebook, T): the layout that the upstream tools read and write as ``codes.npy``.
    tokens
        int32 (T,): the semantic token of each frame.
    finished
        ``"end"``: the end token was drawn; ``"length"``: ``max_frames`` were made;
        ``"cancelled"``: by ``cancel``, or by Ctrl-C if so asked.
    seed
        The same seed gives the same codes.
    timings
        Of a batch: those of all together.
    """

    codes: Codes
    tokens: Codes
    finished: Finished
    seed: int
    timings: Timings = field(default_factory=Timings)


@dataclass
class _Voice:
    """One generation under way."""

    prompt: npt.ArrayLike
    session: Session
    sampler: Sampler
    frames: list[Frame] = field(default_factory=list)
    finished: Finished | None = None

    def result(self, timings: Timings) -> Generation:
        n_codebook = self.session.model.config.n_codebook
        codes = np.array([f.codes for f in self.frames], np.int32).reshape(-1, n_codebook).T
        tokens = np.array([f.token for f in self.frames], np.int32)
        return Generation(
            np.ascontiguousarray(codes),
            tokens,
            self.finished or "cancelled",
            self.sampler.seed,
            timings,
        )


class _Loop:
    """Voices that take their steps together, until each has found its end."""

    def __init__(self, model: Model, voices: Sequence[_Voice], max_frames: int) -> None:
        self._fast: FastAR = model.fast_ar()
        self._model = model
        self._begin = model.config.semantic_begin_id
        self._max_frames = max_frames
        self.voices = list(voices)
        self.timings = Timings()

    def rounds(
        self, cancel: Event | None, cache: PrefixCache | None
    ) -> Iterator[list[tuple[int, Frame]]]:
        """Each round's new frames, with the place of their voice, until all have ended."""
        going = list(range(len(self.voices)))
        first = True
        while going and not (cancel is not None and cancel.is_set()):
            running = self._prefill(cache) if first else self._steps(going)
            first = False
            tokens = self._tokens(running)
            if not tokens:
                return
            made = self._codes(tokens, {i: running[i].hidden for i in tokens})
            new = []
            for row, (i, token) in enumerate(tokens.items()):
                frame = Frame(len(self.voices[i].frames), token, made[row].copy())
                self.voices[i].frames.append(frame)
                new.append((i, frame))
                if len(self.voices[i].frames) == self._max_frames:
                    self.voices[i].finished = "length"
            yield new
            going = [i for i in tokens if self.voices[i].finished is None]

    def _prefill(self, cache: PrefixCache | None) -> dict[int, Output]:
        start = time.perf_counter()
        outputs = [voice.session.prefill(voice.prompt, cache=cache) for voice in self.voices]
        self.timings.prefill += time.perf_counter() - start
        return dict(enumerate(outputs))

    def _tokens(self, running: dict[int, Output]) -> dict[int, int]:
        start = time.perf_counter()
        tokens = {}
        for i, out in running.items():
            sampler = self.voices[i].sampler
            token = sampler.token(out.logits, out.ids)
            if token == sampler.im_end_id:
                self.voices[i].finished = "end"
            else:
                tokens[i] = token
        self.timings.sampling += time.perf_counter() - start
        return tokens

    def _codes(self, tokens: dict[int, int], hidden: dict[int, npt.NDArray[np.float32]]) -> Codes:
        samplers = [self.voices[i].sampler for i in tokens]
        sampling = 0.0

        def choose(codebook: int, logits: npt.NDArray[np.float32]) -> npt.ArrayLike:
            nonlocal sampling
            start = time.perf_counter()
            codes = [s.code(codebook, row) for s, row in zip(samplers, logits, strict=True)]
            sampling += time.perf_counter() - start
            return codes

        start = time.perf_counter()
        first = np.array([token - self._begin for token in tokens.values()], np.int32)
        made = self._fast.frames(np.stack([hidden[i] for i in tokens]), first, choose)
        self.timings.sampling += sampling
        self.timings.fast_ar += time.perf_counter() - start - sampling
        return made

    def results(self) -> list[Generation]:
        return [voice.result(self.timings) for voice in self.voices]

    def _steps(self, which: list[int]) -> dict[int, Output]:
        """The Slow-AR's next position of these voices."""
        start = time.perf_counter()
        last = [self.voices[i].frames[-1] for i in which]
        rows = np.array([[f.token, *f.codes] for f in last], np.int32)
        if len(which) == 1:
            outputs = [self.voices[which[0]].session.step(rows[0])]
        else:
            out = self._model.step_batch([self.voices[i].session for i in which], rows)
            outputs = [Output(h, y, out.ids) for h, y in zip(out.hidden, out.logits, strict=True)]
        self.timings.slow_ar += time.perf_counter() - start
        return dict(zip(which, outputs, strict=True))


def generate(
    model: Model,
    prompt: npt.ArrayLike,
    *,
    max_frames: int,
    temperature: float = 0.8,
    top_p: float = 0.8,
    top_k: int = 30,
    seed: int | None = None,
    min_frames: int = 0,
    im_end_id: int = IM_END_ID,
    on_frame: Callable[[Frame], object] | None = None,
    progress: Callable[[int, int], object] | None = None,
    cancel: Event | None = None,
    prefix_cache: PrefixCache | None = None,
    on_interrupt: Literal["raise", "return"] = "raise",
    **session: Any,
) -> Generation:
    """The codes that follow a prompt.

    Parameters
    ----------
    model
        An open model whose file has a Fast-AR.
    prompt
        Integers (1 + n_codebook, n), as ``Session.prefill`` takes them.
    max_frames
        1 or more. Prompt and frames together decide the size of the cache, which is given back
        when this returns.
    temperature, top_p, top_k, seed, min_frames, im_end_id
        As ``Sampler`` has them.
    on_frame
        Called with each ``Frame``. What it raises ends the generation.
    progress
        Called with (frames made, max_frames) after each.
    cancel
        Looked at before each frame: set, the generation ends with what there is.
    prefix_cache
        Of the same model: what it has of the prompt is not evaluated again.
    on_interrupt
        What Ctrl-C does: ``"raise"``, or ``"return"`` what there is.
    session
        Options of ``Model.session``: ``n_threads``, ``kv_type``, ``attention``, ...

    Raises
    ------
    TypeError, ValueError
        A parameter has the wrong type or is out of range; the message names it.
    ContextFullError
        Prompt and ``max_frames`` are more than the model's context.
    ModelFormatError
        The file has no Fast-AR.
    DeviceMemoryError, ComputeError, SessionStateError
    """
    if on_interrupt not in ("raise", "return"):
        raise ValueError(f"on_interrupt is {on_interrupt!r}, expected 'raise' or 'return'")
    sampler = Sampler(
        model.config,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_frames=min_frames,
        im_end_id=im_end_id,
    )
    with _opened(model, [prompt], [sampler], max_frames, session) as loop:
        try:
            for (_, frame), *_ in loop.rounds(cancel, prefix_cache):
                if on_frame is not None:
                    on_frame(frame)
                if progress is not None:
                    progress(frame.number + 1, max_frames)
        except KeyboardInterrupt:
            if on_interrupt == "raise":
                raise
        return loop.results()[0]


def stream(
    model: Model,
    prompt: npt.ArrayLike,
    *,
    max_frames: int,
    cancel: Event | None = None,
    prefix_cache: PrefixCache | None = None,
    **options: Any,
) -> Iterator[Frame]:
    """The frames of ``generate`` as they are made, with its options.

    What is wrong with the arguments is raised at the first frame. Closing the iterator gives the
    cache back.
    """
    sampling, session = _divided(options)
    sampler = Sampler(model.config, **sampling)
    with _opened(model, [prompt], [sampler], max_frames, session) as loop:
        for (_, frame), *_ in loop.rounds(cancel, prefix_cache):
            yield frame


def generate_batch(
    model: Model,
    prompts: Sequence[npt.ArrayLike],
    *,
    max_frames: int,
    seeds: Sequence[int | None] | None = None,
    on_frame: Callable[[int, Frame], object] | None = None,
    cancel: Event | None = None,
    prefix_cache: PrefixCache | None = None,
    **options: Any,
) -> list[Generation]:
    """``generate`` for 1 to 128 prompts at once: every weight is read once for all.

    A voice's codes do not depend on its neighbours: with the same seed they are those of
    ``generate``, as far as the rounding of a batch allows (see docs/sessions.md).

    Parameters
    ----------
    seeds
        One for each prompt; None: drawn.
    on_frame
        Called with (place of the prompt, frame).
    options
        As ``generate`` has them: of the sampler, but for ``seed``, and of the sessions.
    """
    given = [None] * len(prompts) if seeds is None else list(seeds)
    if len(given) != len(prompts):
        raise ValueError(f"{len(given)} seeds for {len(prompts)} prompts")
    sampling, session = _divided(options)
    samplers = [Sampler(model.config, seed=seed, **sampling) for seed in given]
    with _opened(model, prompts, samplers, max_frames, session) as loop:
        for new in loop.rounds(cancel, prefix_cache):
            for i, frame in new:
                if on_frame is not None:
                    on_frame(i, frame)
        return loop.results()


_SAMPLING = ("temperature", "top_p", "top_k", "seed", "min_frames", "im_end_id")


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the sampler, and those of the session."""
    sampling = {name: options[name] for name in _SAMPLING if name in options}
    return sampling, {k: v for k, v in options.items() if k not in sampling}


@contextmanager
def _opened(
    model: Model,
    prompts: Sequence[npt.ArrayLike],
    samplers: Sequence[Sampler],
    max_frames: int,
    options: dict[str, Any],
) -> Iterator[_Loop]:
    """A voice for each prompt, whose sessions are closed at the end of the block."""
    max_frames = as_int("max_frames", max_frames, 1, MAX_POSITIONS)
    n_ctx = model.config.n_ctx
    with ExitStack() as stack:
        voices = []
        for prompt, sampler in zip(prompts, samplers, strict=True):
            n = len(as_prompt(prompt, model.config))
            if n + max_frames > n_ctx:
                raise errors.ContextFullError(
                    f"a prompt of {n} positions and max_frames of {max_frames} are more than the "
                    f"model's context of {n_ctx}"
                )
            session = model.session(
                n + max_frames, logits="semantic", extra_ids=(sampler.im_end_id,), **options
            )
            voices.append(_Voice(prompt, stack.enter_context(session), sampler))
        yield _Loop(model, voices, max_frames)
