"""Many requests on one model: they come and go between evaluations, and share each of them."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import Flat, as_frame, as_int, as_prompt, check_tokens
from ._batch import MOST, Group, evaluate
from .generation import Frame, Generation, Voice, check_room, next_frames
from .sampler import Sampler
from .session import MAX_POSITIONS, Output

if TYPE_CHECKING:
    from .model import Model
    from .prefix_cache import PrefixCache
    from .session import Logits, Session

Choose = Callable[[Output], Any]
"""From what an evaluation said to the next frame, (1 + n_codebook,) integers; None: that is all."""


_alive: weakref.WeakSet[BatchRunner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No evaluation may be under way when the library's own variables are destroyed."""
    for runner in list(_alive):
        runner._close(patience=10.0)


class Result(NamedTuple):
    """What became of a request."""

    frames: npt.NDArray[np.int32]
    """(n, 1 + n_codebook) what was chosen and evaluated behind the prompt."""
    output: Output
    """Of the last position."""


class RunnerStats(NamedTuple):
    """Requests so far. ``accepted`` is the sum of those that ended and those that have not."""

    accepted: int
    finished: int
    failed: int
    cancelled: int
    waiting: int
    running: int
    evaluations: int
    positions: int


@dataclass(eq=False)
class _Request:
    prompt: Flat
    choose: Choose | None
    voice: Voice | None  # that, or who chooses
    on_frame: Callable[[Frame], object] | None
    future: Future[Any]  # of a Result, of a voice a Generation
    deadline: float  # on the monotonic clock
    patience: float  # seconds: the deadline as it was asked for
    session: Session | None = None
    done: int = 0  # positions of the prompt
    frame: Flat | None = None  # what is evaluated next, once the prompt is done
    frames: list[Flat] = field(default_factory=list)
    output: Output | None = None

    def spoken(self, made: Frame | ValueError | None) -> npt.NDArray[np.int32] | None:
        """Of a voice: what is evaluated next."""
        assert self.voice is not None
        if isinstance(made, ValueError):
            raise made
        if made is not None and self.on_frame is not None:
            self.on_frame(made)
        return None if self.voice.finished else self.voice.row()


class BatchRunner:
    """Serves requests with at most ``max_batch`` sessions, all of them in every evaluation.

    A request is a prompt and a function that chooses each next frame, or a generation: then the
    sampler chooses, and the Fast-AR makes the codes of all of them together. It waits in a queue,
    first come first served, until a session is free; then its prompt is evaluated in chunks, one
    chunk in each evaluation, beside a step of every request that is further. A request that fails,
    is cancelled or is late leaves the others' numbers untouched.

    Parameters
    ----------
    model
        An open model. It must stay open.
    max_batch
        Requests that run at a time, 1 to 128. Each has a KV cache of ``n_ctx`` positions.
    n_ctx
        Positions of a request: prompt and frames together.
    max_queue
        Requests that may wait.
    chunk
        Positions of prompts in one evaluation: what running requests may have to wait for.
    n_threads, kv_type, logits, extra_ids
        As ``Model.session`` has them. For generations the end token must be among ``extra_ids``.
    cache
        Where prompts are looked up and kept.

    Raises
    ------
    DeviceMemoryError
        The caches do not fit.
    TypeError, ValueError
        An argument is out of range, or ``cache`` is another model's.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = 8,
        n_ctx: int = 2048,
        max_queue: int = 64,
        chunk: int = 128,
        n_threads: int | None = None,
        kv_type: str = "f16",
        logits: Logits = "semantic",
        extra_ids: Sequence[int] = (),
        cache: PrefixCache | None = None,
    ) -> None:
        max_batch = as_int("max_batch", max_batch, 1, MOST)
        if cache is not None and cache.model is not model:
            raise ValueError("the prefix cache is of another model")
        self.model = model
        self.n_ctx = n_ctx
        self._n_threads = n_threads
        self._max_queue = as_int("max_queue", max_queue, 1, 2**31 - 1)
        self._chunk = as_int("chunk", chunk, 1, 2**30)
        self._cache = cache
        self._free: list[Session] = []
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._counts = dict.fromkeys(RunnerStats._fields, 0)
        self._closing = False
        self._changed = threading.Condition()
        try:
            for _ in range(max_batch):
                session = model.session(
                    n_threads=n_threads,
                    kv_type=kv_type,
                    logits=logits,
                    extra_ids=extra_ids,
                    own_compute=False,
                )
                self._free.append(session)
                session.init_kv_cache(n_ctx)
        except BaseException:
            for session in self._free:
                session.close()
            raise
        self._sessions = list(self._free)
        self._process = os.getpid()
        _alive.add(self)
        # A daemon: a program that forgets close() must still be able to end.
        self._thread = threading.Thread(target=self._serve, name="slowar-batch", daemon=True)
        self._thread.start()

    # ---- front doors

    def submit(
        self, prompt: npt.ArrayLike, choose: Choose, *, deadline: float | None = None
    ) -> Future[Result]:
        """Ask for a prompt and the frames that ``choose`` makes of it.

        Parameters
        ----------
        prompt
            Integers of shape (1 + n_codebook, n).
        choose
            Called in the runner's thread with the Output of the request's last position, arrays of
            its own; returns the next frame or None. All requests wait for it.
        deadline
            Seconds from now until which it must have ended.

        Returns
        -------
        concurrent.futures.Future
            Its result is a Result. ``cancel()`` works at any time. It raises what ``choose``
            raised, ContextFullError where frames go beyond ``n_ctx``, TimeoutError at the
            deadline, SessionStateError when the runner was closed first.

        Raises
        ------
        TypeError, ValueError, ContextFullError
            The prompt cannot be evaluated.
        QueueFullError
            ``max_queue`` requests wait already.
        SessionStateError
            The runner is closed.
        """
        return self._submit(prompt, deadline, choose=choose)

    async def run(
        self, prompt: npt.ArrayLike, choose: Choose, *, deadline: float | None = None
    ) -> Result:
        """``submit`` for asyncio: awaits the result; cancelling the task cancels the request."""
        return await asyncio.wrap_future(self.submit(prompt, choose, deadline=deadline))

    def generate(
        self,
        prompt: npt.ArrayLike,
        *,
        max_frames: int,
        on_frame: Callable[[Frame], object] | None = None,
        deadline: float | None = None,
        **sampling: Any,
    ) -> Future[Generation]:
        """Ask for the codes that follow a prompt: ``slowar.generate`` beside other requests.

        Parameters
        ----------
        prompt
            Integers of shape (1 + n_codebook, n).
        max_frames
            1 or more; with the prompt at most ``n_ctx``.
        on_frame
            Called in the runner's thread with each ``Frame``. What it raises ends this request. All
            requests wait for it.
        deadline
            Seconds from now until which it must have ended.
        sampling
            ``temperature``, ``top_p``, ``top_k``, ``seed``, ``min_frames``, ``im_end_id`` as
            ``slowar.generate`` has them. With the same seed the codes are the same, whoever else
            is served, as far as the rounding of a batch allows (docs/sessions.md).

        Returns
        -------
        concurrent.futures.Future
            Its result is a Generation; ``cancel()`` works at any time. It raises what ``submit``'s
            raises, and ComputeError where the Fast-AR failed.

        Raises
        ------
        TypeError, ValueError
            A parameter has the wrong type or is out of range, or the end token is not among the
            runner's ``extra_ids``.
        ContextFullError
            Prompt and ``max_frames`` are more than ``n_ctx``.
        ModelFormatError
            The file has no Fast-AR.
        QueueFullError, SessionStateError, DeviceMemoryError
        """
        self._check_process()
        sampler = Sampler(self.model.config, **sampling)
        session = self._sessions[0]
        sampler.check(session._ids[session._logits])
        max_frames = as_int("max_frames", max_frames, 1, MAX_POSITIONS)
        self.model.fast_ar()
        return self._submit(prompt, deadline, voice=Voice(sampler, max_frames), on_frame=on_frame)

    async def generate_async(self, prompt: npt.ArrayLike, **options: Any) -> Generation:
        """``generate`` for asyncio: awaits the result; cancelling the task cancels the request."""
        return await asyncio.wrap_future(self.generate(prompt, **options))

    async def stream(self, prompt: npt.ArrayLike, **options: Any) -> AsyncGenerator[Frame, None]:
        """``generate`` for asyncio: the frames as they are made.

        Closing the iterator, or cancelling the task that reads it, cancels the request.
        """
        loop = asyncio.get_running_loop()
        frames: asyncio.Queue[Frame | None] = asyncio.Queue()  # at most max_frames

        def put(frame: Frame | None) -> None:
            loop.call_soon_threadsafe(frames.put_nowait, frame)

        def end(_: Future[Generation]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                put(None)

        future = self.generate(prompt, on_frame=put, **options)
        future.add_done_callback(end)
        try:
            while (frame := await frames.get()) is not None:
                yield frame
            future.result()
        finally:
            future.cancel()

    def _submit(
        self,
        prompt: npt.ArrayLike,
        deadline: float | None,
        *,
        choose: Choose | None = None,
        voice: Voice | None = None,
        on_frame: Callable[[Frame], object] | None = None,
    ) -> Future[Any]:
        self._check_process()
        self.model._handle.check()
        flat = as_prompt(prompt, self.model.config)
        if len(flat) > self.n_ctx:
            raise errors.ContextFullError(
                f"a prompt of {len(flat)} positions does not fit in {self.n_ctx}"
            )
        if voice is not None:
            check_room(len(flat), voice.max_frames, self.n_ctx, "the runner's n_ctx")
        patience = float("inf") if deadline is None else float(deadline)
        if not patience > 0:
            raise ValueError(f"deadline is {deadline} s, expected more than 0")
        ends = time.monotonic() + patience
        request = _Request(flat, choose, voice, on_frame, Future(), ends, patience)
        with self._changed:
            if self._closing:
                raise errors.SessionStateError("the runner is closed")
            # Under this lock the sessions stay open, whatever they are doing.
            check_tokens(self._sessions[0]._handle._pointer, flat)
            if len(self._waiting) >= self._max_queue:
                raise errors.QueueFullError(f"{self._max_queue} requests wait already")
            self._waiting.append(request)
            self._counts["accepted"] += 1
            self._changed.notify()
        return request.future

    @property
    def stats(self) -> RunnerStats:
        self._check_process()
        with self._changed:
            self._counts["waiting"] = len(self._waiting)
            self._counts["running"] = len(self._running)
            return RunnerStats(**self._counts)

    def close(self) -> None:
        """End: requests that have not ended raise SessionStateError. Twice is fine.

        Waits for the evaluation that is under way.
        """
        self._close(None)

    def _close(self, patience: float | None) -> None:
        if os.getpid() != self._process:
            return  # the thread and its lock are the parent's
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _check_process(self) -> None:
        # Before the lock, which a child process may have inherited taken.
        if os.getpid() != self._process:
            raise errors.SessionStateError(f"the runner belongs to process {self._process}")

    def __enter__(self) -> BatchRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- the runner's thread

    def _serve(self) -> None:
        try:
            while self._gather():
                self._advance()
        finally:
            with self._changed:
                self._closing = True
                left = [*self._running, *self._waiting]
                self._waiting.clear()
            for request in left:
                self._fail(request, errors.SessionStateError("the runner was closed"))
            for session in self._sessions:
                session.close()

    def _gather(self) -> bool:
        """Wait for work; let go of what is over and take in what waits. False: the end."""
        with self._changed:
            while not (self._closing or self._running or self._waiting):
                self._changed.wait()
            if self._closing:
                return False
            waiting = list(self._waiting)
        self._drop_over([*self._running, *waiting])
        while self._admit():
            pass
        return True

    def _drop_over(self, requests: Sequence[_Request]) -> None:
        now = time.monotonic()
        for request in requests:
            if request.future.cancelled():
                self._end(request, "cancelled")
            elif now > request.deadline:
                late = TimeoutError(
                    f"not done after {request.patience:g} s: {request.done} of "
                    f"{len(request.prompt)} prompt positions and {len(request.frames)} frames"
                )
                self._fail(request, late)

    def _admit(self) -> bool:
        """Who has waited longest gets a session. False: nobody waits, or none is free."""
        with self._changed:
            if not (self._free and self._waiting):
                return False
            request = self._waiting.popleft()
            session = request.session = self._free.pop()
            self._running.append(request)
        try:
            session.reset()
            if self._cache is not None:
                request.done = self._cache.load(session, request.prompt)
        except Exception as error:
            self._fail(request, error)
        return True

    def _advance(self) -> None:
        """One evaluation: a frame of each request that has one, and prompts, the oldest first."""
        left = self._chunk
        who: list[_Request] = []
        sessions: list[Session] = []
        flats: list[Flat] = []
        for request in self._running:
            if request.frame is not None:
                part = request.frame
            else:
                part = request.prompt[request.done : request.done + left]
                left -= len(part)
            if len(part) > 0 and request.session is not None:
                who.append(request)
                sessions.append(request.session)
                flats.append(part)
        if not who:
            return
        start = time.monotonic()
        try:
            out = evaluate(Group(sessions, flats, sessions[0]._logits), sum(map(len, flats)))
        except Exception as error:
            for request in who:
                self._fail(request, error)
            return
        seconds = time.monotonic() - start
        self._counts["evaluations"] += 1
        self._counts["positions"] += sum(map(len, flats))
        ready = []
        for i, request in enumerate(who):
            request.output = Output(out.hidden[i].copy(), out.logits[i].copy(), out.ids)
            if self._took(request, len(flats[i]), seconds):
                ready.append(request)
        self._choose(ready)

    def _took(self, request: _Request, n: int, seconds: float) -> bool:
        """Note an evaluation of n positions. Whether the next frame is to be chosen now."""
        if request.voice is not None:
            request.voice.spend(seconds, prefill=request.frame is None)
        if request.frame is not None:
            request.frames.append(request.frame)
            return True
        request.done += n
        if request.done < len(request.prompt):
            return False
        if self._cache is not None and request.session is not None:
            try:
                self._cache.store(request.session)
            except Exception as error:
                self._fail(request, error)
                return False
        return True

    def _choose(self, ready: Sequence[_Request]) -> None:
        """The next frames of these: each by its own function, voices together."""
        voices, outputs = [], []
        speaking = []
        for request in ready:
            assert request.output is not None
            if request.choose is not None:
                self._go_on(request, partial(request.choose, request.output))
            elif request.voice is not None:
                speaking.append(request)
                voices.append(request.voice)
                outputs.append(request.output)
        if not speaking:
            return
        try:
            made = next_frames(self.model, voices, outputs, self._n_threads)
        except Exception as error:
            for request in speaking:
                self._fail(request, error)
            return
        for request, frame in zip(speaking, made, strict=True):
            self._go_on(request, partial(request.spoken, frame))

    def _go_on(self, request: _Request, choose: Callable[[], Any]) -> None:
        """With the frame that ``choose`` gives, or to the end where it gives none."""
        try:
            chosen = choose()
            request.frame = None if chosen is None else self._checked(request, chosen)
        except BaseException as error:
            self._fail(request, error)
            return
        if request.frame is None:
            self._finish(request)

    def _checked(self, request: _Request, chosen: npt.ArrayLike) -> Flat:
        flat = as_frame(chosen, self.model.config)
        check_tokens(self._sessions[0]._handle._pointer, flat)
        if len(request.prompt) + len(request.frames) >= self.n_ctx:
            raise errors.ContextFullError(f"the request has filled its {self.n_ctx} positions")
        return flat

    def _finish(self, request: _Request) -> None:
        n_codebook = self.model.config.n_codebook
        result: Result | Generation
        if request.voice is not None:
            result = request.voice.result(n_codebook)
        else:
            assert request.output is not None
            empty = np.empty((0, 1 + n_codebook), np.int32)
            result = Result(np.concatenate([empty, *request.frames]), request.output)
        if self._end(request, "finished"):
            # What a callback of the future raises is the callback's affair.
            with suppress(BaseException):
                request.future.set_result(result)

    def _fail(self, request: _Request, error: BaseException) -> None:
        if isinstance(error, StopIteration):  # which asyncio's futures refuse
            who = "choose" if request.voice is None else "on_frame"
            error = RuntimeError(f"{who} raised StopIteration")
        if self._end(request, "failed"):
            with suppress(BaseException):
                request.future.set_exception(error)

    def _end(self, request: _Request, how: str) -> bool:
        """Let go of a request. False: it was cancelled, and those who wait for it know now."""
        try:
            wanted = request.future.set_running_or_notify_cancel()
        except (RuntimeError, InvalidStateError):  # somebody else has answered
            wanted = False
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
            if request in self._running:
                self._running.remove(request)
            if request.session is not None:
                self._free.append(request.session)
                request.session = None
            self._counts[how if wanted else "cancelled"] += 1
        return wanted
