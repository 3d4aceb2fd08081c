"""Chat templates: messages to prompt text, in a sandbox, with special tokens kept out of what users wrote."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.model.text.messages import Message

_PRIVATE_USE = range(0xF0000, 0x110000)


class ChatTemplate:
    """A Jinja chat template with the names and filters that Hugging Face gives one.

    Args:
      source: the template's text.
      special_strings: the texts of the tokenizer's special tokens.
      variables: what templates read beside the messages: `bos_token`, `eos_token` and so on.
    """

    def __init__(self, source: str, special_strings: Iterable[str], variables: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {_one_line(error)}") from error
        self._variables = dict(variables)
        strings = sorted(special_strings, key=len, reverse=True)
        first = "|".join(sorted({re.escape(text[0]) for text in strings}))
        whole = "|".join(map(re.escape, strings))
        self._special = re.compile(rf"(?={first})(?={whole})(.)" if strings else r"(?!)()", re.DOTALL)
        self._starts = frozenset(text[:length] for text in strings for length in range(1, len(text)))
        self._longest = max(map(len, strings), default=0)

    def render(self, messages: Sequence[Message], **variables: Any) -> tuple[str, str]:
        """The prompt's text, and a mark: a character that stands inside each special token that a message spells out.

        Encode the text between real special tokens with the mark removed, and nothing that came in a message can act
        as a special token. The mark is a private-use character that no message contains; it is "" where none was set.

        Args:
          messages: each with `role` and `content`, and whatever else the template reads.
          **variables: further names for the template, such as `tools` or `enable_thinking`.

        Raises:
          ValueError: the template refuses these messages, or fails.
        """
        given = {"messages": list(messages), **variables}
        text = json.dumps(given, ensure_ascii=False, default=str)
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        names = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            rendered = self._template.render(**(names | self._variables | self._guard(given, mark)))
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {_one_line(error)}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(f"chat template: {_one_line(error)} (the messages may lack what it reads)") from error
        return rendered, mark if mark in rendered else ""

    def _guard(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._guard_text(value, mark)
        if isinstance(value, Mapping):
            # The name of a tool's parameter comes from outside as well.
            return {self._special.sub(rf"\g<1>{mark}", key): self._guard(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, mark) for item in value]
        return value

    def _guard_text(self, text: str, mark: str) -> str:
        """Puts the mark behind the first character of each special token and of each one that the end cuts off.

        The latter may come whole where the template joins two strings, even if it strips them before.
        """
        end = len(text.rstrip())
        cut = [begin for begin in range(max(0, end - self._longest), end) if text[begin:end] in self._starts]
        places = [0, *(begin + 1 for begin in cut), len(text)]
        parts = (text[begin:stop] for begin, stop in itertools.pairwise(places))
        return mark.join(self._special.sub(rf"\g<1>{mark}", part) for part in parts)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's words for training: the body as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


EXTENSIONS = [loopcontrols, _Generation]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
