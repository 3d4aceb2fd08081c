"""Kimi's `tiktoken.model` as a Hugging Face tokenizer with the same ids.

The file lists byte strings by rank; BPE joins the neighbours whose union has the lowest rank. A `tokenizers` BPE model
does the same where *every* way to cut a token into two tokens is a merge, ordered by the token's rank. Its regular
expressions know class intersection, so Kimi's word pattern is taken as published.
"""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxspec.model.text.byte_alphabet import text_of

RANKS = "tiktoken.model"
CONFIG = "tokenizer_config.json"
TOKENIZER_CLASS = "TikTokenTokenizer"  # What Kimi's tokenizer_config.json calls its remote code.
SPECIAL_TOKENS = 256

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def is_kimi(config: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer_config.json` is that of a Kimi checkpoint."""
    return config.get("tokenizer_class") == TOKENIZER_CLASS


def read_from_ranks(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether `folder`'s tokenizer is its tiktoken.model; a tokenizer.json beside Kimi's is somebody's conversion."""
    return (folder / RANKS).is_file() and (is_kimi(config) or not (folder / "tokenizer.json").is_file())


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of `folder`'s tiktoken.model and of `config`, its tokenizer_config.json.

    Raises:
      ValueError: naming file and field, for ranks that are damaged or cut off, or names that do not fit them.
    """
    if not is_kimi(config):
        raise ValueError(
            f"{folder / CONFIG} tokenizer_class: found {config.get('tokenizer_class')!r}, expected "
            f"{TOKENIZER_CLASS!r} beside {RANKS}: no other word pattern is known"
        )
    ranks = read_ranks(folder / RANKS)
    return byte_pair_tokenizer(ranks, special_names(config, len(ranks), folder / CONFIG))


def read_ranks(path: Path) -> list[bytes]:
    """The tokens of a tiktoken file in order of rank.

    Raises:
      ValueError: naming line or rank, unless each line is a token in base64 and its rank, the ranks are 0, 1, 2, … and
        each single byte is there.
    """
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            value = base64.b64decode(token, validate=True)
            if ranks.setdefault(int(rank), value) != value or not value:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{path} line {number}: found {line[:60]!r}, expected a token in base64 and its rank"
            ) from None
    tokens = [ranks.get(rank, b"") for rank in range(len(ranks))]
    if b"" in tokens:
        raise ValueError(f"{path}: rank {tokens.index(b'')} is missing, expected 0 to {max(ranks)}")
    present = Counter(tokens)
    if len(present) < len(tokens):
        raise ValueError(f"{path}: token {present.most_common(1)[0][0]!r} has several ranks, expected one")
    if missing := [byte for byte in range(256) if bytes([byte]) not in present]:
        raise ValueError(f"{path}: byte 0x{missing[0]:02x} is missing, expected a token for each single byte")
    return tokens


def special_names(config: Mapping[str, Any], first: int, where: Path) -> list[str]:
    """The texts of the 256 ids from `first` on: as `added_tokens_decoder` says, reserved names for the others.

    Raises:
      ValueError: naming the id, where one that the config names lies outside (the ranks are cut off, say).
    """
    named = config.get("added_tokens_decoder") or {}
    if not isinstance(named, dict):
        raise ValueError(f"{where} added_tokens_decoder: found {type(named).__name__}, expected an object")
    names = {index: f"<|reserved_token_{index}|>" for index in range(first, first + SPECIAL_TOKENS)}
    for key, token in named.items():
        index = int(key) if key.isdecimal() else -1
        if index not in names or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(
                f"{where} added_tokens_decoder: found id {key}, expected ids {first} to {first + SPECIAL_TOKENS - 1}, "
                f"which follow the {first} ranks of {RANKS}, each with its content"
            )
        names[index] = token["content"]
    if len(set(names.values())) < SPECIAL_TOKENS:
        raise ValueError(f"{where} added_tokens_decoder: found a name twice, expected {SPECIAL_TOKENS} different names")
    return list(names.values())


def byte_pair_tokenizer(tokens: Sequence[bytes], specials: Sequence[str]) -> Tokenizer:
    """A tokenizer of these tokens in order of rank, with `specials` as the ids that follow.

    Raises:
      ValueError: naming the special token that is an ordinary token as well.
    """
    vocabulary = {text_of(token): rank for rank, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for text in vocabulary:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    # A word that is a token is taken whole, as tiktoken does before it looks at pairs.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    for index, name in enumerate(specials, start=len(tokens)):
        if tokenizer.token_to_id(name) != index:
            raise ValueError(f"{RANKS}: holds {name!r} as rank {tokenizer.token_to_id(name)}, expected a special token")
    return tokenizer
