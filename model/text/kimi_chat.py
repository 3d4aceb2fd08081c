"""What a Kimi conversation looks like: generations, built-in chat templates, tools, stop tokens, long runs of text.

A checkpoint's own Jinja template is used where it has one; the built-in ones say the same.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from jaxspec.model.text.typescript import as_typescript

STOP_TOKENS = ("<|im_end|>", "[EOS]", "[EOT]")
# The published encoder works on texts of at most 400,000 characters, cut again inside runs of (non-)space characters.
MAX_TEXT, MAX_RUN = 400_000, 25_000
_RUN = re.compile(r"\S+|\s+")


class Generation(StrEnum):
    """Kimi models that speak differently."""

    K2 = "K2-Instruct"  # Does not think; tools as JSON.
    K2_THINKING = "K2-Thinking"  # Opens <think> by itself; tools as JSON with sorted keys.
    K25 = "K2.5"  # And later: the prompt opens <think>; tools as TypeScript.


def generation_of(model_config: Mapping[str, Any], specials: Sequence[str]) -> Generation:
    """The generation of a Kimi checkpoint, by its `config.json` and its special tokens."""
    if model_config.get("model_type") == "kimi_k25" or "text_config" in model_config:
        return Generation.K25
    return Generation.K2_THINKING if "<think>" in specials else Generation.K2


def template_variables(generation: Generation, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the published tokenizers hand to the template for `given`: keys sorted, tools as TypeScript besides.

    Raises:
      ValueError: naming the switch, where `thinking` or `preserve_thinking` is not true or false.
    """
    for switch in ("thinking", "preserve_thinking"):
        if not isinstance(given.get(switch, True), bool):
            raise ValueError(f"{switch}: found {given[switch]!r}, expected true or false")
    variables = dict(given)
    if variables.get("tools") and generation != Generation.K2:
        variables["tools"] = _sorted(variables["tools"])
        if generation == Generation.K25:
            variables["tools_ts_str"] = as_typescript(variables["tools"])
    return variables


def cuts(text: str) -> Iterator[int]:
    """Positions where the published encoder cuts `text`, each part encoded by itself."""
    for start in range(0, len(text), MAX_TEXT):
        if start:
            yield start
        for run in _RUN.finditer(text, start, min(start + MAX_TEXT, len(text))):
            yield from range(run.start() + MAX_RUN, run.end(), MAX_RUN)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def built_in_template(generation: Generation) -> str:
    """A Jinja template for checkpoints that bring none."""
    return _SETTINGS[generation] + _TEMPLATE


_SYSTEM = "{%- set default_system = 'You are Kimi, an AI assistant created by Moonshot AI.' -%}"
_SETTINGS = {
    Generation.K2: _SYSTEM + "{%- set thinks, opens = false, false -%}",
    Generation.K2_THINKING: _SYSTEM + "{%- set thinks, opens = true, false -%}",
    Generation.K25: "{%- set default_system = none -%}{%- set thinks, opens = true, true -%}",
}
# Reasoning is kept from the answer after which only tools were called, or everywhere with `preserve_thinking`.
_TEMPLATE = """
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{ content }}
  {%- else -%}
    {%- for part in content or [] -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}

{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools_ts_str or (tools | tojson(separators=(',', ':'))) }}<|im_end|>
{%- endif -%}
{%- if default_system and (not messages or messages[0].role != 'system') -%}
  <|im_system|>system<|im_middle|>{{ default_system }}<|im_end|>
{%- endif -%}

{%- set seen = namespace(answered=-1, calls=0) -%}
{%- if not preserve_thinking -%}
  {%- for message in messages -%}
    {%- if message.role == 'assistant' and not message.tool_calls -%}
      {%- set seen.answered = loop.index0 -%}
    {%- endif -%}
  {%- endfor -%}
{%- endif -%}

{%- for message in messages -%}
  {%- set name = message.name or message.role -%}
  {%- if message.role == 'user' -%}
    <|im_user|>{{ name }}<|im_middle|>
  {%- elif message.role == 'assistant' -%}
    <|im_assistant|>{{ name }}<|im_middle|>
    {%- if thinks -%}
      {%- set kept = loop.index0 > seen.answered and not (opens and thinking is false) -%}
      <think>{{ message.reasoning_content or '' if kept else '' }}</think>
    {%- endif -%}
  {%- else -%}
    <|im_system|>{{ name }}<|im_middle|>
    {%- if message.role == 'tool' -%}
      {{ '## Return of ' ~ message.tool_call_id ~ '\\n' }}
    {%- endif -%}
  {%- endif -%}
  {{ text_of(message.content) }}
  {%- if message.role == 'assistant' and message.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for call in message.tool_calls -%}
      {%- set arguments = call.function.arguments -%}
      <|tool_call_begin|>{{ call.id or 'functions.' ~ call.function.name ~ ':' ~ seen.calls -}}
      <|tool_call_argument_begin|>{{ arguments if arguments is string else arguments | tojson -}}
      <|tool_call_end|>
      {%- set seen.calls = seen.calls + 1 -%}
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}

{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
  {%- if opens -%}
    <think>
    {%- if thinking is false -%}</think>{%- endif -%}
  {%- endif -%}
{%- endif -%}
"""
