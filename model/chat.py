"""Chat templates: messages to prompt text, in a sandbox, with special tokens kept out of what users wrote."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

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
        # A special token may also come together where the template joins two strings, so one cut off by the end of a
        # string counts as well.
        cut = sorted({text[:length] for text in strings for length in range(1, len(text))}, key=len, reverse=True)
        whole = "|".join(map(re.escape, strings))
        parts = "|".join(map(re.escape, cut))
        self._special = re.compile(rf"(?=(?:{whole})|(?:{parts})\s*\Z)(.)", re.DOTALL) if strings else None

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
            return self._special.sub(rf"\g<1>{mark}", value) if self._special else value
        if isinstance(value, Mapping):
            return {key: self._guard(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, mark) for item in value]
        return value


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
