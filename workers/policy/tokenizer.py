"""A raw `tokenizers` tokenizer behind the small surface that `renderers` asks for, without transformers.

`guard` makes text safe: what a user, a tool or a task says can never become a control token, whatever it spells.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

BREAK = "\ufdd0"
"""A Unicode noncharacter, never valid in text: `encode` cuts there, so that no control token spans it."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
VOCABULARY = 4096
_ENDS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text to ids and back. `raw` is a `tokenizers.Tokenizer`; `name_or_path` the folder (or file) it came from.

    A control token that a text spells becomes that token, as the templates of models need it: `guard` is for every text
    that comes from outside.
    """

    def __init__(self, raw: Any, name_or_path: str = "") -> None:
        raw.encode_special_tokens = False
        self.raw = raw
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = None
        known = (raw.token_to_id(token) for token in _ENDS)
        self.eos_token_id: int | None = next((token for token in known if token is not None), None)
        self.size: int = raw.get_vocab_size(with_added_tokens=True)
        added = {number: token for number, token in raw.get_added_tokens_decoder().items() if _controls(token)}
        self.control: dict[int, str] = {number: token.content for number, token in added.items()}
        """Id -> text of each control token. Words and blanks that were added to the vocabulary are none."""
        self._folds = raw.normalizer is not None and any(token.normalized for token in added.values())
        longest = sorted(self.control.values(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of `text`; the pieces between BREAK marks are encoded each by itself."""
        if BREAK not in text:
            return list(self.raw.encode(text, add_special_tokens=add_special_tokens).ids)
        pieces = filter(None, text.split(BREAK))
        return [i for piece in pieces for i in self.raw.encode(piece, add_special_tokens=False).ids]

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self.raw.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self.raw.token_to_id(tokens)
        return [self.raw.token_to_id(token) for token in tokens]

    def guard(self, text: str, keep: Sequence[str] = ()) -> str:
        """`text` with every spelling of a control token broken, so that `encode` can't make that token of it.

        Text without one comes back as it is. A BREAK that was there already becomes the replacement character. Those in
        `keep` stay whole.
        """
        text = text.replace(BREAK, "\ufffd")
        if self._folds:
            plain = self.raw.normalizer.normalize_str(text)
            if self._control.search(plain):  # a look-alike that the tokenizer itself would make the token of
                text = plain.replace(BREAK, "\ufffd")
        kept = re.compile("|".join(map(re.escape, keep)) or r"(?!)")
        while self._control.search(text):
            broken = self._control.sub(lambda found: _broken(found[0], kept), text)
            if broken == text:
                break  # all that is left is to be kept
            text = broken
        return text


def _controls(token: Any) -> bool:
    text = token.content
    return len(text.strip()) > 1 and (token.special or not text.isalnum())


def _broken(text: str, kept: re.Pattern[str]) -> str:
    return text if kept.fullmatch(text) else text[:1] + BREAK + text[1:]


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a folder (`tokenizer.json`) or in that file. Raises ConfigError."""
    from tokenizers import Tokenizer as Raw

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"policy.tokenizer: {path} holds no tokenizer.json: give the folder of the served model")
    try:
        raw = Raw.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for every fault of the file
        raise ConfigError(f"policy.tokenizer: {file} can't be read: {error}") from error
    return Tokenizer(raw, name_or_path=str(path))


def make(
    folder: str | Path,
    vocabulary: int = VOCABULARY,
    special: Sequence[str] = SPECIAL,
    markup: Sequence[str] = MARKUP,
) -> Tokenizer:
    """Train a real byte-level BPE on the standard library's sources; about a second.

    Its control tokens are Qwen3's unless `special` (as `decode(skip_special_tokens=True)` leaves them out) and `markup`
    say others. Writes `tokenizer.json` into `folder`, whole or not at all. The same Python gives the same tokenizer.
    """
    from tokenizers import AddedToken, Regex, Tokenizer as Raw, decoders, models, pre_tokenizers, trainers

    raw = Raw(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(markup),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train(_corpus(), trainer)
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=place, suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(json.loads(raw.to_str()), file, ensure_ascii=False)
    os.replace(beside, place / "tokenizer.json")
    return Tokenizer(raw, name_or_path=str(folder))


def _corpus() -> list[str]:
    """The standard library's top modules, in a fixed order."""
    return sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
