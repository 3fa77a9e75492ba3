"""Text to tokens and back: a folder's tokenizer.json, or bytes where there is none."""

import codecs
import pathlib
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the decode loops need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> "TextStream": ...


class TextStream(Protocol):
    """Tokens of one sequence in, whatever text they have completed out."""

    def push(self, token: int) -> str: ...

    def close(self) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens, for models whose vocabulary is bytes."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raises ValueError where a byte is not in the vocabulary."""
        tokens = list(text.encode())
        if outside := [t for t in tokens if t >= self.vocab_size]:
            raise ValueError(f"the text holds the byte {outside[0]}, but the model's vocabulary ends at {self.vocab_size - 1}")
        return tokens

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else "\N{REPLACEMENT CHARACTER}"

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class FileTokenizer:
    """A ``tokenizer.json`` through the ``tokenizers`` package."""

    def __init__(self, path: pathlib.Path):
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{path} needs the tokenizers package: pip install 'replayssm-jax[tokenizers]'"
            ) from error
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def stream(self) -> TextStream:
        return _FileStream(self._tokenizer)


class _FileStream:
    """Decodes the whole sequence again with each token and returns what is new: merges may change what came before.

    What has been shown is not taken back. Where a decoder rewrites it, nothing more is shown until it agrees again, and at the
    end only what lies behind as many characters: some text may be missing.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        # an unfinished character at the end decodes to a replacement that the next token may still complete
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(self._shown):
            return ""
        return self._advance(text)

    def close(self) -> str:
        return self._advance(self._tokenizer.decode(self._tokens))

    def _advance(self, text: str) -> str:
        new, self._shown = text[len(self._shown) :], text
        return new


def load_tokenizer(folder: str | pathlib.Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint folder: its ``tokenizer.json``, or bytes if it has none and a vocabulary of at most 256.

    Raises:
        ModuleNotFoundError: there is a tokenizer.json, but not the package that reads it.
        ValueError: there is none, and the vocabulary is too large for bytes.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if path.is_file():
        return FileTokenizer(path)
    if vocab_size > 256:
        raise ValueError(f"{folder} has no tokenizer.json, and a vocabulary of {vocab_size} is not bytes")
    return ByteTokenizer(vocab_size)


def pad_prompts(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of unequal length as one array: tokens [B, longest] int32, zeros behind each, and lengths [B] int32."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths
