"""Text to token ids and back, streaming included, from a converted checkpoint's `tokenizer/` folder."""

import codecs
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.model.text import kimi_chat, tiktoken_tokenizer
from jaxspec.model.text.byte_alphabet import bytes_of
from jaxspec.model.text.chat import ChatTemplate
from jaxspec.model.text.messages import Message, check_messages, check_tools

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A byte-level tokenizer with its chat template and end ids.

    Attributes:
      vocab_size: ids it knows; the model's own vocabulary may be padded beyond.
      eos_token_ids: ids that end an answer.
      chat_template: None where the checkpoint has none.
      kimi: the generation of a Kimi checkpoint, None for another model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        eos_token_ids: Iterable[int] = (),
        model_config: dict[str, Any] | None = None,
    ):
        if "ByteLevel" not in _decoder_types(backend):
            found = ", ".join(sorted(_decoder_types(backend))) or "none"
            raise ValueError(f"tokenizer.json decoder: found {found}, only ByteLevel is supported")
        self._parsing = backend
        # The same tokenizer, to which special tokens are ordinary text.
        self._literal = tokenizers.Tokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        self._special = {i: t.content for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._shown = frozenset(_shown_tokens(config))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        names = {name: _content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
        ends = [backend.token_to_id(names["eos_token"])] if "eos_token" in names else []
        template = _default_template(config.get("chat_template"))
        specials = list(self._special.values())
        self.kimi = None
        if tiktoken_tokenizer.is_kimi(config):
            self.kimi = kimi_chat.generation_of(model_config or {}, specials)
            template = template or kimi_chat.built_in_template(self.kimi)
            ends += [backend.token_to_id(name) for name in kimi_chat.STOP_TOKENS]
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *(end for end in ends if end is not None)}))
        self.chat_template = ChatTemplate(template, specials, names) if template else None

    @classmethod
    def from_checkpoint(cls, folder: Path) -> "Tokenizer":
        """Reads the tokenizer of a converted checkpoint, or of a plain Hugging Face folder.

        Raises:
          FileNotFoundError: the folder is missing, or has neither tokenizer.json nor tiktoken.model.
          ValueError: a file can't be read or holds what is not supported; names the file.
        """
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        files = folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder
        config = _read_json(files / "tokenizer_config.json")
        backend = _read_backend(files, config)
        if (files / "chat_template.jinja").is_file():
            config["chat_template"] = (files / "chat_template.jinja").read_text(encoding="utf-8")
        ends: set[int] = set()
        model_config = _read_json(folder / "jaxspec.json").get("config", {}) | _read_json(folder / "config.json")
        text_config = model_config.get("text_config")
        for source in (
            model_config,
            text_config if isinstance(text_config, dict) else {},
            _read_json(files / "generation_config.json"),
        ):
            end = source.get("eos_token_id")
            found = end if isinstance(end, list) else [] if end is None else [end]
            if not all(isinstance(index, int) for index in found):
                raise ValueError(f"{folder}: eos_token_id: found {end!r}, expected a token id or a list of them")
            ends.update(found)
        return cls(backend, config, ends, model_config)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: special tokens spelt out in it count as such; a BOS comes first if that is the rule."""
        _checked(text)
        return [index for part in _split(text, self._cuts(text)) for index in self._parsing.encode(part).ids]

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Ids of a conversation up to where the assistant speaks next.

        A special token spelt out in a message or a tool stays plain text: nobody can end a turn or begin a system
        message from inside one. Otherwise these are the ids of transformers'
        `apply_chat_template(add_generation_prompt=True)`.

        Args:
          messages: each with `role` and `content`, and whatever else the template reads.
          **variables: further names for the template, such as `tools`, `enable_thinking`, or for Kimi `thinking` and
            `preserve_thinking`.

        Raises:
          ValueError: there is no chat template, or it refuses these messages; or naming what is not text in them, the
            tool that is not a function with a JSON schema, the switch that is not true or false.
        """
        if self.chat_template is None:
            raise ValueError("chat template: this checkpoint has none; give a raw prompt")
        check_messages(messages)
        if variables.get("tools"):
            check_tools(variables["tools"])
        if self.kimi is not None:
            variables = kimi_chat.template_variables(self.kimi, variables)
        text, mark = self.chat_template.render(messages, **variables)
        _checked(text)
        encoding = self._parsing.encode(text, add_special_tokens=False)
        cuts = self._cuts(text.replace(mark, "") if mark else text)
        if not mark and not cuts:
            return encoding.ids
        specials = [item for item in zip(encoding.ids, encoding.offsets, strict=True) if item[0] in self._special]
        ids: list[int] = []
        start = place = 0  # The same position with the marks counted and without.
        for index, (begin, end) in [*specials, (None, (len(text), len(text)))]:
            literal = text[start:begin].replace(mark, "") if mark else text[start:begin]
            for part in _split(literal, [cut - place for cut in cuts]):
                ids += self._literal.encode(part, add_special_tokens=False).ids
            if index is not None:
                ids.append(index)
            place += len(literal) + end - begin
            start = end
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that form no UTF-8 character become U+FFFD, ids beyond the vocabulary nothing."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, skip_special: bool = True) -> "Detokenizer":
        """A new stream that turns ids into text as they come."""
        return Detokenizer(self, skip_special)

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for; b"" for an id without a token."""
        return self._pieces[index] if 0 <= index < len(self._pieces) else b""

    def to_json(self) -> str:
        """The text of a tokenizer.json that describes this tokenizer."""
        return self._parsing.to_str()

    def is_special(self, index: int) -> bool:
        """Whether a token is a control token, which `decode` skips."""
        return index in self._special and index not in self._shown

    def special_text(self, index: int) -> str | None:
        """The text of a special token, shown or not; None for an ordinary one."""
        return self._special.get(index)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over which id means which token: equal for a target and a drafter that share a tokenizer."""
        digest = hashlib.sha256()
        for token, index in sorted(self._parsing.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
            digest.update(f"{index}\t{token}\n".encode())
        return digest.hexdigest()

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocabulary.values()) + 1)
        for token, index in vocabulary.items():
            pieces[index] = bytes_of(token)
        return pieces

    def _cuts(self, text: str) -> list[int]:
        """Where the model's own encoder cuts very long texts."""
        return list(kimi_chat.cuts(text)) if self.kimi is not None else []


class Detokenizer:
    """Turns a stream of token ids into text, never half a character; constant work a token.

    Args:
      tokenizer: whose ids these are.
      skip_special: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; a character whose last byte is still to come waits."""
        kept = (i for i in ids if not (self._skip_special and self._tokenizer.is_special(i)))
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in kept))

    def flush(self) -> str:
        """Ends the stream: bytes of an unfinished character come out as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _read_backend(files: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    if tiktoken_tokenizer.read_from_ranks(files, config):
        return tiktoken_tokenizer.read_tokenizer(files, config)
    path = files / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no tokenizer there; convert the checkpoint with its tokenizer files")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a readable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _split(text: str, places: Iterable[int]) -> list[str]:
    """`text`, cut at those of `places` that lie inside it."""
    inside = [place for place in places if 0 < place < len(text)]
    return [text[first:last] for first, last in itertools.pairwise([0, *inside, len(text)])]


def _shown_tokens(config: Mapping[str, Any]) -> Iterator[int]:
    """Ids of added tokens that the checkpoint does not count as control tokens: <think>, say."""
    named = config.get("added_tokens_decoder")
    for index, token in named.items() if isinstance(named, dict) else ():
        if index.isdecimal() and isinstance(token, dict) and token.get("special") is False:
            yield int(index)


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    return {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"tokenizer_config.json: found {token!r} as a special token, expected text")
    return content


def _default_template(value: Any) -> str | None:
    """A checkpoint holds one template or a list of named ones."""
    named = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else None
    template = value if named is None else next((i.get("template") for i in named if i.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer_config.json chat_template: found {template!r}, expected text")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {type(content).__name__}, expected an object")
    return content


def _checked(text: str) -> str:
    """Raises ValueError for text that is no UTF-8: a terminal or a file hands on stray bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: found {text[error.start]!r} at character {error.start}, expected UTF-8 text"
        ) from None
    return text
