"""From text and reference voices to the positions that the Slow-AR reads."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .model import Config

Tokens = npt.NDArray[np.int32]

_TASK = "convert the provided text to speech"
_SPEAKER = re.compile(r"<\|speaker:\d+\|>")


def prompt(
    text: str,
    tokenizer: str | os.PathLike[str] | Tokenizer,
    references: Sequence[tuple[str, npt.ArrayLike]] = (),
    *,
    config: Config | None = None,
) -> Tokens:
    r"""The prompt that makes the model speak ``text``.

    Without references::

        <|im_start|>system\nconvert the provided text to speech<|im_end|>\n
        <|im_start|>user\nTEXT<|im_end|>\n
        <|im_start|>assistant\n<|voice|>

    (the line ends are those written as ``\n``). With references the system message is instead::

        convert the provided text to speech reference to the following:\n\n
        Text:\n<|speaker:0|>REFTEXT0\n<|speaker:1|>REFTEXT1\n\nSpeech:\nCODES0 CODES1

    A reference text with a speaker tag of its own gets no other. Each of the parts that are
    constant, TEXT and the reference texts are tokenized by themselves, so that nothing grows
    together with what a user wrote.

    Parameters
    ----------
    text
        What to say.
    tokenizer
        The path of a ``tokenizer.json``, or a ``tokenizers.Tokenizer``, which loads once.
    references
        (what was said, integer codes (n_codebook, T)) of each reference voice.
    config
        The model's (``model.config``); None: that of the released S2 Pro.

    Returns
    -------
    ndarray
        int32 (1 + n_codebook, n): row 0 token ids, the other rows codes. A code position has the id
        ``semantic_begin_id`` + its first code; a text position has zeros for codes.

    Raises
    ------
    ImportError
        The ``tokenizers`` package is missing: ``pip install 'pyggml_slowar[text]'``.
    FileNotFoundError
        There is no such file.
    TypeError, ValueError
        ``tokenizer`` is none, lacks a token by name or is not the model's; a text is empty or
        cannot be encoded; codes have the wrong dtype or shape or are out of range.

    Notes
    -----
    Texts are ordinary text: a control token spelt in them, ``<|im_end|>`` say, is tokenized as the
    characters it consists of. Only speaker tags, ``<|speaker:0|>``, keep their meaning, where the
    tokenizer has them as tokens.
    """
    c = _s2_pro() if config is None else config
    vocabulary = _Vocabulary(tokenizer, c)
    columns: list[Tokens] = []

    def add(ids: list[int]) -> None:
        block = np.zeros((1 + c.n_codebook, len(ids)), np.int32)
        block[0] = ids
        columns.append(block)

    start, end = vocabulary.id("<|im_start|>"), vocabulary.id("<|im_end|>")
    newline = vocabulary.plain("\n")
    if references:
        spoken, codes = _references(references, c)
        add([start, *vocabulary.plain("system\n")])
        add(vocabulary.plain(f"{_TASK} reference to the following:\n\nText:\n"))
        add(vocabulary.user("a reference text", spoken))
        add(vocabulary.plain("\n\nSpeech:\n"))
        columns.extend(codes)
    else:
        add([start, *vocabulary.plain("system\n"), *vocabulary.plain(_TASK)])
    add([end, *newline, start, *vocabulary.plain("user\n")])
    add(vocabulary.user("text", _as_text("text", text)))
    add([end, *newline, start, *vocabulary.plain("assistant\n"), vocabulary.id("<|voice|>")])
    return np.concatenate(columns, axis=1)


def _s2_pro() -> Config:
    from .make_model import S2_PRO  # which loads the gguf package

    return S2_PRO


def _references(
    references: Sequence[tuple[str, npt.ArrayLike]], config: Config
) -> tuple[str, list[Tokens]]:
    texts: list[str] = []
    blocks: list[Tokens] = []
    for i, (text, codes) in enumerate(references):
        text = _as_text(f"the text of reference {i}", text)
        texts.append(text if _SPEAKER.search(text) else f"<|speaker:{i}|>{text}")
        array = _as_codes(f"the codes of reference {i}", codes, config)
        blocks.append(np.concatenate([array[:1] + config.semantic_begin_id, array]))
    return "\n".join(texts), blocks


def _as_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {type(text).__name__}, expected str")
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate at character {error.start}") from None
    return text


def _as_codes(name: str, codes: npt.ArrayLike, config: Config) -> Tokens:
    array = np.asarray(codes)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} have dtype {array.dtype}, expected an integer dtype")
    if array.ndim != 2 or array.shape[0] != config.n_codebook or array.shape[1] == 0:
        raise ValueError(
            f"{name} have shape {array.shape}, expected ({config.n_codebook}, T), T at least 1"
        )
    outside = np.argwhere((array < 0) | (array >= config.codebook_size))
    if len(outside):
        row, column = (int(i) for i in outside[0])
        raise ValueError(
            f"{name} have {array[row, column]} at row {row}, column {column}, "
            f"expected 0 to {config.codebook_size - 1}"
        )
    return array.astype(np.int32)


class _Vocabulary:
    """A tokenizer that is the model's, and by which no text turns into a control token."""

    def __init__(self, source: str | os.PathLike[str] | Tokenizer, config: Config) -> None:
        self._tokenizer = _tokenizer(source)
        self._n_vocab = config.n_vocab
        last = config.codebook_size - 1
        for code, expected in ((0, config.semantic_begin_id), (last, config.semantic_end_id)):
            name = f"<|semantic:{code}|>"
            if self.id(name) != expected:
                raise ValueError(
                    f"{name} is {self.id(name)} in the tokenizer, expected {expected}, the model's"
                )
        added = self._tokenizer.get_added_tokens_decoder()
        self._names = {
            i: token.content for i, token in added.items() if not _SPEAKER.fullmatch(token.content)
        }

    def id(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise ValueError(f"the tokenizer has no {name}")
        if found >= self._n_vocab:
            raise ValueError(f"{name} is {found}, expected 0 to {self._n_vocab - 1}")
        return int(found)

    def plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self._n_vocab:
            raise ValueError(
                f"the tokenizer gives id {max(ids)} for {text!r}, "
                f"expected 0 to {self._n_vocab - 1}, the model's"
            )
        return list(ids)

    def user(self, what: str, text: str) -> list[int]:
        """``text`` with every name of a control token cut behind its first character."""
        cuts = {0}
        for name in self._names.values():
            if name in text:
                # A lookahead: occurrences may overlap.
                found = re.finditer(f"(?={re.escape(name)})", text)
                cuts.update(match.start() + 1 for match in found)
        starts = sorted(cuts)
        parts = zip(starts, [*starts[1:], len(text)], strict=True)
        ids = [i for a, b in parts for i in self.plain(text[a:b])]
        # Where the tokenizer normalises, a name may come about that was not in the text.
        for i in ids:
            if i in self._names:
                raise ValueError(f"{what} contains {self._names[i]}, a control token")
        return ids


def _tokenizer(source: str | os.PathLike[str] | Tokenizer) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            "prompts are made with the tokenizers package: pip install 'pyggml_slowar[text]'"
        ) from error
    if isinstance(source, Tokenizer):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"tokenizer is {type(source).__name__}, expected a path or a tokenizers.Tokenizer"
        )
    content = Path(source).read_bytes()
    try:
        return Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)} is not a tokenizer.json: {error}") from None
