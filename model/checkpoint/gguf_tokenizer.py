"""The tokenizer inside a GGUF file, written out as Hugging Face tokenizer files."""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

# Llama 3's word pattern; `llama-bpe` also takes a word that is in the vocabulary whole, without merging.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `folder`, which exists.

    Raises:
      ValueError: naming the metadata key, for a tokenizer that is not byte-level BPE or splits words in an unknown way;
        nothing is written then.
    """
    reader = GGUFReader(gguf_path)

    def read(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    tokens: list[str] = _required(read, "tokenizer.ggml.tokens")
    tokenizer = _byte_level_bpe(read, tokens)

    def token(name: str) -> str | None:
        index = read(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    bos = token("bos")
    if read("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, read("tokenizer.ggml.bos_token_id"))]
        )
    ends = [read(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "chat_template": read("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    generation = {
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({end for end in ends if end is not None}),
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        present = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(present, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_level_bpe(read: Any, tokens: list[str]) -> Tokenizer:
    kind = _required(read, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"GGUF tokenizer.ggml.model: found {kind!r}, only 'gpt2' (byte-level BPE) is supported")
    words = _required(read, "tokenizer.ggml.pre")
    if words not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF tokenizer.ggml.pre: found {words!r}, expected one of {sorted(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ")) for merge in _required(read, "tokenizer.ggml.merges")]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=words == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[words]()
    tokenizer.decoder = decoders.ByteLevel()
    types = _required(read, "tokenizer.ggml.token_type")
    for text, kind in zip(tokens, types, strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return tokenizer


def _required(read: Any, key: str) -> Any:
    value = read(key)
    if value is None:
        raise ValueError(f"GGUF {key}: missing, needed for the tokenizer")
    return value
