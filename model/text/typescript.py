"""Tool definitions as the TypeScript declarations that Kimi K2.5 and later were trained on.

The text must be the published encoder's to the character, since the model has seen no other. What that encoder cannot
express (`oneOf` without a type, references to another file, …) has no declaration, and the JSON form is used instead.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

INDENT = "  "
_SCALARS = {"integer": "number"}
_IN_UNIONS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_ENUMS: Mapping[Any, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


class _Inexpressible(Exception):
    """A schema that has no declaration."""


def as_typescript(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declarations of `tools`, which passed `check_tools` and have their keys sorted; None if one has none."""
    try:
        declarations = [_Function(tool["function"]).declaration() for tool in tools]
    except _Inexpressible:
        return None
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *declarations, "}", ""])


class _Function:
    """One function and the definitions (`$defs`) that its schema was found to hold so far."""

    def __init__(self, function: Mapping[str, Any]):
        self.function = function
        self.definitions: dict[str, Any] = {}
        self.refers_to_itself = False

    def declaration(self) -> str:
        parameters = self.function.get("parameters") or {}
        shape = self.object(parameters, "")
        interfaces = []
        if self.refers_to_itself:
            shape = "parameters"
            fields = self.fields(parameters, INDENT)
            interfaces.append(f"interface parameters {{{_framed(fields)}}}")
        for name, definition in list(self.definitions.items()):
            if isinstance(definition, bool):
                raise _Inexpressible
            body = f"interface {name} {self.type(definition, '')}"
            interfaces.append(_comment(definition.get("description", ""), "") + body)
        described = _comment(self.function.get("description") or "", "")
        return "\n".join(
            [*interfaces, f"{described}type {self.function.get('name', 'function')} = (_: {shape}) => any;"]
        )

    def type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self.reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(one, indent) for one in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_IN_UNIONS[one] for one in kind)
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self.array(schema, indent)
        if kind is None and schema:
            raise _Inexpressible
        return _SCALARS.get(kind, kind) if kind else "any"

    def reference(self, target: str) -> str:
        if target == "#":
            self.refers_to_itself = True
            return "parameters"
        name = target.rsplit("/", 1)[-1]
        if not target.startswith("#/$defs/") or name not in self.definitions:
            raise _Inexpressible
        return name

    def object(self, schema: Mapping[str, Any], indent: str) -> str:
        self.definitions |= schema.get("$defs") or {}
        required = schema.get("required", [])
        inner = indent + INDENT
        # Definitions are declared in the order in which they come to light: of other fields first, then by name.
        more = schema.get("additionalProperties")
        others = [] if more is None else ["never" if more is False else self.type(more, inner)]
        written = dict(zip(schema.get("properties", {}), self.fields(schema, inner), strict=True))
        lines = [written[name] for name in sorted(written, key=lambda name: (name not in required, name))]
        lines += [f"{inner}[k: string]: {other}" for other in others]
        return f"{{{_framed(lines)}{indent if lines else ''}}}"

    def fields(self, schema: Mapping[str, Any], indent: str) -> list[str]:
        required = schema.get("required", [])
        return [
            f"{_field_comment(field, indent)}{indent}{name if name in required else name + '?'}: "
            + self.type(field, indent)
            for name, field in schema.get("properties", {}).items()
        ]

    def array(self, schema: Mapping[str, Any], indent: str) -> str:
        item = schema.get("items") or {}
        comment = _type_comment(item, indent + INDENT)
        if not comment:
            return f"Array<{self.type(item, indent)}>"
        return f"Array<\n{comment}{indent}{INDENT}{self.type(item, indent + INDENT)}\n{indent}>"


def _framed(lines: Sequence[str]) -> str:
    return "\n" + ",\n".join(lines) + "\n" if lines else ""


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind):
            raise _Inexpressible
        kind = next((one for one in kind if one != "null"), kind[0])
    for value in schema["enum"]:
        if value is not None and not isinstance(value, _ENUMS.get(kind, (object,))):
            raise _Inexpressible
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


def _comment(text: str, indent: str) -> str:
    """Each line of `text` as a comment; empty lines stay empty."""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""


def _type_comment(schema: Any, indent: str) -> str:
    """What a schema says of itself: its description and, of a plain type, its limits."""
    if isinstance(schema, bool):
        return ""
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum")) and isinstance(schema.get("type"), str)
    names = _LIMITS.get(schema["type"], ()) if plain else ()
    limits = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    return _comment(schema.get("description", ""), indent) + (f"{indent}// {limits}\n" if limits else "")


def _field_comment(schema: Any, indent: str) -> str:
    default = None if isinstance(schema, bool) else schema.get("default")
    if default is None:
        return _type_comment(schema, indent)
    written = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
    return f"{_type_comment(schema, indent)}{indent}// Default: {written}\n"
