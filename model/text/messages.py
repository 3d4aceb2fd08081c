"""What a conversation and its tools may hold. What a text model cannot read is refused by name, not left out."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

Message = Mapping[str, Any]
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError, naming the message and its part, unless each content is text, text parts or nothing.

    A message without a role is refused, too: templates give it another's, that of the system message say.
    """
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{place}]: found {reprlib.repr(message)}, expected an object")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"messages[{place}].role: found {reprlib.repr(message.get('role'))}, expected its name")
        where = f"messages[{place}].content"
        content = message.get("content")
        if isinstance(content, str | None):
            continue
        if not isinstance(content, list | tuple):
            raise ValueError(f"{where}: found {reprlib.repr(content)}, expected text or a list of text parts")
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise ValueError(f"{where}[{number}].type: found {kind!r}, expected 'text': no other part is read")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"{where}[{number}].text: found {reprlib.repr(part.get('text'))}, expected text")


def check_tools(tools: Any) -> None:
    """Raises ValueError, naming the tool and its field, unless each is a function with a JSON schema."""
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools: found {reprlib.repr(tools)}, expected a list of functions")
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            found = tool.get("type") if isinstance(tool, Mapping) else tool
            raise ValueError(f"{where}.type: found {reprlib.repr(found)}, expected 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{where}.function: found {reprlib.repr(function)}, expected an object")
        name = function.get("name")
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            raise ValueError(
                f"{where}.function.name: found {reprlib.repr(name)}, expected letters, digits, '_', '-' and '.'"
            )
        if not isinstance(function.get("description"), str | None):
            raise ValueError(
                f"{where}.function.description: found {reprlib.repr(function['description'])}, expected text"
            )
        _check_schema(function.get("parameters"), f"{where}.function.parameters")


def _check_schema(schema: Any, where: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: found {reprlib.repr(schema)}, expected a JSON schema")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        path = ".".join([where, *map(str, error.absolute_path)])
        raise ValueError(f"{path}: found {reprlib.repr(error.instance)}, which is no JSON schema (2020-12)") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply, expected a JSON schema") from None
