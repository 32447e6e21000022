"""From a prompt to codes: Slow-AR, sampler and Fast-AR in a loop, for one voice or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import as_int, as_prompt
from .sampler import IM_END_ID, Sampler
from .session import MAX_POSITIONS, Output, Session

if TYPE_CHECKING:
    from .fast_ar import Codes
    from .model import Model
    from .prefix_cache import PrefixCache

FRAMES_PER_SECOND = 44100 / 2048
"""Of audio: the codec's sampling rate over its hop length, 21.53."""

Progress = Callable[[int, int], object]
"""(done, of all)"""

Finished = Literal["end", "length", "cancelled"]


@dataclass
class Timings:
    """Seconds that a generation took, by what they were spent on.

    Of voices that share their evaluations: those that this one took part in.
    """

    prefill: float = 0.0
    slow_ar: float = 0.0
    fast_ar: float = 0.0
    sampling: float = 0.0


class Frame(NamedTuple):
    """One frame of a generation."""

    number: int
    """From 0."""
    token: int
    """The semantic token."""
    codes: Codes
    """int32 (n_codebook,)."""
    timings: Timings
    """Of the generation so far."""


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
    """

    codes: Codes
    tokens: Codes
    finished: Finished
    seed: int
    timings: Timings


@dataclass
class Voice:
    """One generation under way."""

    sampler: Sampler
    max_frames: int
    frames: list[Frame] = field(default_factory=list)
    finished: Finished | None = None
    timings: Timings = field(default_factory=Timings)

    def row(self) -> Codes:
        """The last frame as the Slow-AR reads it: int32 (1 + n_codebook,)."""
        return np.array([self.frames[-1].token, *self.frames[-1].codes], np.int32)

    def spend(self, seconds: float, *, prefill: bool) -> None:
        """On an evaluation of the Slow-AR."""
        if prefill:
            self.timings.prefill += seconds
        else:
            self.timings.slow_ar += seconds

    def add(self, token: int, codes: Codes, fast_ar: float, sampling: float) -> Frame:
        """Another frame, made in so many seconds."""
        self.timings.fast_ar += fast_ar
        self.timings.sampling += sampling
        frame = Frame(len(self.frames), token, codes, replace(self.timings))
        self.frames.append(frame)
        if len(self.frames) == self.max_frames:
            self.finished = "length"
        return frame

    def result(self, n_codebook: int) -> Generation:
        codes = np.array([f.codes for f in self.frames], np.int32).reshape(-1, n_codebook).T
        return Generation(
            np.ascontiguousarray(codes),
            np.array([f.token for f in self.frames], np.int32),
            self.finished or "cancelled",
            self.sampler.seed,
            self.timings,
        )


def next_frames(
    model: Model, voices: Sequence[Voice], outputs: Sequence[Output], n_threads: int | None
) -> list[Frame | ValueError | None]:
    """What follows each voice's last position: a frame, or None where the voice has ended.

    A voice whose logits are no numbers gets the error in its place; its neighbours go on.
    """
    made: list[Frame | ValueError | None] = [None] * len(voices)
    sampling = 0.0

    def sample(which: Iterable[int], choose: Callable[[int], int]) -> list[int]:
        nonlocal sampling
        start = time.perf_counter()
        chosen = []
        for i in which:
            try:
                chosen.append(0 if made[i] else choose(i))
            except ValueError as error:
                made[i] = error
                chosen.append(0)
        sampling += time.perf_counter() - start
        return chosen

    tokens = sample(
        range(len(voices)), lambda i: voices[i].sampler.token(outputs[i].logits, outputs[i].ids)
    )
    going = [i for i, error in enumerate(made) if not error]
    for i in going:
        if tokens[i] == voices[i].sampler.im_end_id:
            voices[i].finished = "end"
    going = [i for i in going if voices[i].finished is None]
    if not going:
        return made

    def choose(codebook: int, logits: npt.NDArray[np.float32]) -> list[int]:
        rows = dict(zip(going, logits, strict=True))
        return sample(going, lambda i: voices[i].sampler.code(codebook, rows[i]))

    before, start = sampling, time.perf_counter()
    first = [tokens[i] - model.config.semantic_begin_id for i in going]
    hidden = np.stack([outputs[i].hidden for i in going])
    codes = model.fast_ar().frames(hidden, first, choose, n_threads=n_threads)
    fast_ar = time.perf_counter() - start - (sampling - before)
    for i, row in zip(going, codes, strict=True):
        if made[i] is None:
            made[i] = voices[i].add(tokens[i], row.copy(), fast_ar, sampling)
    return made


class _CancelledError(Exception):
    """Out of a prefill."""


class _Loop:
    """Voices that take their steps together, until each has found its end."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[npt.ArrayLike],
        voices: Sequence[Voice],
        sessions: Sequence[Session],
        n_threads: int | None,
        cancel: Event | None,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._voices = voices
        self._sessions = sessions
        self._n_threads = n_threads
        self._cancel = cancel

    def rounds(
        self, cache: PrefixCache | None, on_prefill: Progress | None = None
    ) -> Iterator[list[tuple[int, Frame]]]:
        """Each round's new frames, with the place of their voice, until all have ended."""
        try:
            outputs = self._prefill(cache, on_prefill)
        except _CancelledError:
            return
        going = list(range(len(self._voices)))
        while not self._is_cancelled():
            voices = [self._voices[i] for i in going]
            made = next_frames(self._model, voices, outputs, self._n_threads)
            new = []
            for i, frame in zip(going, made, strict=True):
                if isinstance(frame, ValueError):
                    raise frame
                if frame is not None:
                    new.append((i, frame))
            if new:
                yield new
            going = [i for i in going if self._voices[i].finished is None]
            if not going or self._is_cancelled():
                return
            outputs = self._steps(going)

    def _is_cancelled(self) -> bool:
        return self._cancel is not None and self._cancel.is_set()

    def _prefill(self, cache: PrefixCache | None, on_prefill: Progress | None) -> list[Output]:
        def progress(done: int, total: int) -> None:
            if on_prefill is not None:
                on_prefill(done, total)
            if self._is_cancelled():
                raise _CancelledError

        start = time.perf_counter()
        outputs = []
        for session, prompt in zip(self._sessions, self._prompts, strict=True):
            if self._is_cancelled():
                raise _CancelledError
            outputs.append(session.prefill(prompt, progress=progress, cache=cache))
        for voice in self._voices:
            voice.spend(time.perf_counter() - start, prefill=True)
        return outputs

    def _steps(self, which: list[int]) -> list[Output]:
        """The Slow-AR's next position of these voices."""
        start = time.perf_counter()
        sessions = [self._sessions[i] for i in which]
        rows = np.stack([self._voices[i].row() for i in which])
        if len(which) == 1:
            outputs = [sessions[0].step(rows[0])]
        else:
            out = self._model.step_batch(sessions, rows)
            outputs = [Output(h, y, out.ids) for h, y in zip(out.hidden, out.logits, strict=True)]
        for i in which:
            self._voices[i].spend(time.perf_counter() - start, prefill=False)
        return outputs

    def results(self) -> list[Generation]:
        return [voice.result(self._model.config.n_codebook) for voice in self._voices]


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
    progress: Progress | None = None,
    on_prefill: Progress | None = None,
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
    on_prefill
        Called with (positions done, all) after each chunk of the prompt.
    cancel
        Looked at before each frame and each chunk of the prompt: set, the generation ends with
        what there is.
    prefix_cache
        Of the same model: what it has of the prompt is not evaluated again.
    on_interrupt
        What Ctrl-C does: ``"raise"``, or ``"return"`` what there is.
    session
        Options of ``Model.session``: ``n_threads``, which is the Fast-AR's too, ``kv_type``,
        ``attention``, ...

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
    with _opened(model, [prompt], [sampler], max_frames, cancel, session) as loop:
        try:
            for [(_, frame)] in loop.rounds(prefix_cache, on_prefill):
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
) -> Generator[Frame, None, None]:
    """The frames of ``generate`` as they are made, with its options but for callbacks.

    Shapes, lengths and the sampler's options are looked at by this call, token values, the cache
    and the session's options with the first frame. Closing the iterator gives the memory back.
    """
    sampling, session = _divided(options)
    sampler = Sampler(model.config, **sampling)
    _check_length(model, prompt, max_frames)
    model.fast_ar()

    def frames() -> Generator[Frame, None, None]:
        with _opened(model, [prompt], [sampler], max_frames, cancel, session) as loop:
            for [(_, frame)] in loop.rounds(prefix_cache):
                yield frame

    return frames()


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
    with _opened(model, prompts, samplers, max_frames, cancel, session) as loop:
        for new in loop.rounds(prefix_cache):
            for i, frame in new:
                if on_frame is not None:
                    on_frame(i, frame)
        return loop.results()


_SAMPLING = ("temperature", "top_p", "top_k", "seed", "min_frames", "im_end_id")


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the sampler, and those of the session."""
    sampling = {name: options[name] for name in _SAMPLING if name in options}
    return sampling, {k: v for k, v in options.items() if k not in sampling}


def _check_length(model: Model, prompt: npt.ArrayLike, max_frames: int) -> int:
    """Positions of both together."""
    n = len(as_prompt(prompt, model.config))
    max_frames = as_int("max_frames", max_frames, 1, MAX_POSITIONS)
    check_room(n, max_frames, model.config.n_ctx, "the model's context")
    return n + max_frames


def check_room(n: int, max_frames: int, room: int, whose: str) -> None:
    if n + max_frames > room:
        raise errors.ContextFullError(
            f"a prompt of {n} positions and max_frames of {max_frames} are more than {whose} of "
            f"{room}"
        )


@contextmanager
def _opened(
    model: Model,
    prompts: Sequence[npt.ArrayLike],
    samplers: Sequence[Sampler],
    max_frames: int,
    cancel: Event | None,
    options: dict[str, Any],
) -> Iterator[_Loop]:
    """A voice for each prompt, whose sessions are closed at the end of the block."""
    lengths = [_check_length(model, prompt, max_frames) for prompt in prompts]
    model.fast_ar()
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                model.session(n, logits="semantic", extra_ids=(sampler.im_end_id,), **options)
            )
            for n, sampler in zip(lengths, samplers, strict=True)
        ]
        voices = [Voice(sampler, max_frames) for sampler in samplers]
        yield _Loop(model, prompts, voices, sessions, options.get("n_threads"), cancel)
