"""Kimi's tokenizer files made on the spot: a small vocabulary that really merges, and one of the true size."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxspec.model.text.byte_alphabet import bytes_of
from jaxspec.model.text.tiktoken_tokenizer import WORDS

# Offset from the first special id → name and whether the checkpoint counts it as a control token.
NAMES = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
TEXT = (
    "The quick brown fox doesn't jump; it's 2024 and we'll see 12,345 apples. HTTPServer iPhone ÉCOLE école naïve\n\n"
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # ababababa aaaaaaaa ====== \t\t\n"
    "中文和日本語のテキスト混ざる한국어 русский العربية हिन्दी 一二三abc四五 <|im_end|> [BOS] 👩‍👩‍👧‍👦\r\n"
) * 3


def trained_ranks(size: int) -> list[bytes]:
    """`size` tokens learnt from a few lines, in order of rank."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return [bytes_of(backend.id_to_token(index)) for index in range(backend.get_vocab_size())]


def true_size_ranks(known: dict[int, bytes]) -> list[bytes]:
    """163,584 tokens: the bytes, `known` at their ranks, and byte strings that no text holds."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"\xff\xfe" + rank.to_bytes(3, "big") for rank in range(256, 163584)]
    for rank, token in known.items():
        tokens[rank] = token
    return tokens


def write_kimi_tokenizer(folder: Path, ranks: Sequence[bytes], thinks: bool = True, **settings: Any) -> Path:
    """tiktoken.model and tokenizer_config.json as Moonshot publishes them, without a chat template."""
    folder.mkdir(exist_ok=True)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    named = {
        str(len(ranks) + offset): {"content": name, "special": special}
        for offset, (name, special) in NAMES.items()
        if thinks or "think" not in name
    }
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder
