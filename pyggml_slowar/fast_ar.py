"""The Fast-AR: from the Slow-AR's hidden vector and a frame's first code to its other codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import as_int
from ._native import Closing, Handle, call, ffi, lib
from ._threads import Threads
from .device import default_threads
from .model import config_of, info_of, weight_bytes
from .session import MAX_THREADS, session_params

if TYPE_CHECKING:
    from .model import Model, TensorInfo

Codes = npt.NDArray[np.int32]

Choose = Callable[[int, npt.NDArray[np.float32]], npt.ArrayLike]
"""(codebook, logits (n, codebook_size)) -> n codes, of that codebook, one for each frame."""

_FAST = 1  # SLOWAR_PART_FAST
_MOST = 128  # frames at once
_MOST_EVALUATORS = 4  # beside the one that adapts: each has threads and compute memory of its own
_FULL_CACHE = "f32"  # eleven positions: rounding them would save nothing


@dataclass(frozen=True)
class FastConfig:
    """Hyper-parameters of a Fast-AR, all from the metadata (``fish_speech.fast_*``)."""

    n_ctx: int
    """Positions: the hidden vector, and a code for each codebook but the last."""
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    codebook_size: int
    rope_freq_base: float
    norm_rms_eps: float
    attention_qk_norm: bool
    n_hidden: int
    """Length of the vector at position 0: the Slow-AR's ``n_embd``."""
    project_in: bool
    """Whether a matrix brings that vector to ``n_embd``."""


class FastAR(Closing):
    """The Fast-AR of a model's file, with a cache for each of the frames that it makes at once.

    Calls from several threads are served one after the other.

    Parameters
    ----------
    model
        An open model; the Fast-AR goes where its last layer is.

    Raises
    ------
    ModelFormatError
        The file has no Fast-AR, or one that cannot be run; the message names the key or tensor.
    SessionStateError
        The model is closed.
    DeviceMemoryError
        The weights do not fit.
    """

    def __init__(self, model: Model) -> None:
        model._handle.check()
        way = replace(model._way, part=_FAST)
        places: dict[str, int] = {}
        if model.n_gpu_layers == model.config.n_layer and way.devices:
            places = {t.name: len(way.devices) - 1 for t in way.look({})}
        self._way, self._places = way, places
        self._model = way.open(places, load=True)
        pointer = self._model._pointer
        self.config = config_of(pointer, FastConfig)
        self.nbytes = weight_bytes(info_of(pointer))
        """Bytes of weights."""
        self._n_codes = model.config.n_codebook
        if self.config.n_ctx < self._n_codes:
            raise errors.ModelFormatError(
                f"{model.path}: key fish_speech.fast_context_length is {self.config.n_ctx}, "
                f"expected {self._n_codes} or more: a position for each codebook"
            )
        c = model.config
        n_semantic = c.semantic_end_id - c.semantic_begin_id + 1
        if n_semantic > self.config.codebook_size:
            raise errors.ModelFormatError(
                f"{model.path}: {n_semantic} semantic ids, expected at most "
                f"{self.config.codebook_size}: each is a code of the first codebook"
            )
        self._adapting = Threads(default_threads(), adapt=True)
        self._handle = self._evaluator(self._adapting.n)
        self._others: dict[int, tuple[Handle, Threads]] = {}
        self._sessions: list[Handle] = []

    def frames(
        self,
        hidden: npt.ArrayLike,
        first: npt.ArrayLike,
        choose: Choose,
        *,
        n_threads: int | None = None,
    ) -> Codes:
        """The codes of n frames, codebook after codebook, each chosen before the next is asked for.

        Parameters
        ----------
        hidden
            float32 (n, n_hidden): ``Output.hidden`` of the Slow-AR, 1 to 128 rows.
        first
            Integers (n,): the codes of codebook 0, that is semantic token less
            ``semantic_begin_id``.
        choose
            Called with (codebook, logits (n, codebook_size)) for codebooks 1, 2, ... in turn.
        n_threads
            CPU threads, 1 to 512; None: ``default_threads()``, and fewer while the machine is
            shared.

        Returns
        -------
        ndarray
            int32 (n, n_codebook).

        Raises
        ------
        TypeError, ValueError
            A shape or a code is out of range; the message names it.
        ComputeError, DeviceMemoryError, SessionStateError
        """
        vectors = np.ascontiguousarray(hidden, np.float32)
        n = len(vectors) if vectors.ndim == 2 else 0
        if vectors.shape != (n, self.config.n_hidden) or not 1 <= n <= _MOST:
            raise ValueError(
                f"hidden has shape {vectors.shape}, expected (n, {self.config.n_hidden}) with n of "
                f"1 to {_MOST}"
            )
        codes = np.empty((n, self._n_codes), np.int32)
        codes[:, 0] = self._checked(0, first, n)

        if n_threads is not None:
            n_threads = as_int("n_threads", n_threads, 1, MAX_THREADS)

        def make(pointer: Any) -> Codes:
            threads = self._adapting
            if n_threads is not None:
                pointer, threads = self._with_threads(n_threads)
            sessions = self._caches(n)
            logits = self._evaluate(pointer, threads, sessions, codes[:, 0], vectors)
            for codebook in range(1, self._n_codes):
                codes[:, codebook] = self._checked(codebook, choose(codebook, logits), n)
                if codebook + 1 < self._n_codes:
                    logits = self._evaluate(pointer, threads, sessions, codes[:, codebook])
            return codes

        return self._handle.run(make)

    def tensors(self) -> list[TensorInfo]:
        """Name, type, shape, bytes and place of each tensor."""
        self._handle.check()
        return self._way.look(self._places)

    def _evaluate(
        self,
        pointer: Any,
        threads: Threads,
        sessions: list[Handle],
        codes: Codes,
        hidden: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Logits (n, codebook_size) behind further codes (n,) or (n, m) of n frames.

        With ``hidden`` (n, n_hidden) they begin anew.
        """
        n = len(codes)
        table = np.ascontiguousarray(codes.reshape(n, -1))
        base = ffi.from_buffer("int32_t[]", table)
        items = ffi.new("slowar_batch_item[]", n)
        for i, session in enumerate(sessions):
            items[i].session = session._pointer
            items[i].tokens = base + i * table.shape[1]
            items[i].n_tokens = table.shape[1]
        logits = np.empty((n, self.config.codebook_size), np.float32)
        mark = threads.before()
        call(
            lib.slowar_eval_fast,
            pointer,
            items,
            n,
            ffi.NULL if hidden is None else ffi.from_buffer("float[]", hidden),
            threads.n,
            ffi.from_buffer("float[]", logits),
        )
        threads.after(mark)
        return logits

    def _evaluator(self, n_threads: int) -> Handle:
        out = ffi.new("slowar_batch **")
        call(lib.slowar_batch_open, out, self._model._pointer, n_threads, ffi.NULL, 0)
        return Handle(out[0], lib.slowar_batch_close, "Fast-AR")

    def _with_threads(self, n: int) -> tuple[Any, Threads]:
        """What evaluates with just so many threads; kept for the last few numbers asked for."""
        if n not in self._others:
            while len(self._others) >= _MOST_EVALUATORS:
                self._others.pop(next(iter(self._others)))[0].close()
            self._others[n] = self._evaluator(n), Threads(n, adapt=False)
        handle, threads = self._others[n]
        return handle._pointer, threads

    def _caches(self, n: int) -> list[Handle]:
        """The first n of the caches, made when they are first needed.

        A frame begins with an empty one, so any will do, and the same give the graph that is ready.
        """
        while len(self._sessions) < n:
            self._sessions.append(self._cache("auto"))
        return self._sessions[:n]

    def _cache(self, attention: str) -> Handle:
        params, _keep = session_params(1, attention, _FULL_CACHE, (), -1, "auto")
        out = ffi.new("slowar_session **")
        call(lib.slowar_session_open, out, self._model._pointer, params)
        session = Handle(out[0], lib.slowar_session_close, "cache")
        call(lib.slowar_init_kv_cache, out[0], self.config.n_ctx)
        return session

    def _checked(self, codebook: int, codes: npt.ArrayLike, n: int) -> Codes:
        array = np.asarray(codes)
        if array.shape != (n,) or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"codes of codebook {codebook} are {array.dtype} {array.shape}, expected integers "
                f"({n},)"
            )
        if array.min() < 0 or array.max() >= self.config.codebook_size:
            raise ValueError(
                f"codes of codebook {codebook} are {array.min()} to {array.max()}, expected 0 to "
                f"{self.config.codebook_size - 1}"
            )
        return array.astype(np.int32)

    def close(self) -> None:
        """Give it back; twice is fine."""
        super().close()
        for handle in [*self._sessions, *(handle for handle, _ in self._others.values())]:
            handle.close()
        self._sessions = []
        self._others = {}
        self._model.close()
