"""Kimi's conversations as text: turns, reasoning kept or dropped, tools, and what is refused."""

import json

import pytest

from jaxspec.model.text.kimi_chat import Generation
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.model.text.typescript import as_typescript
from tests.support.kimi_files import trained_ranks, write_kimi_tokenizer

CONFIGS = {
    Generation.K2: {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "eos_token_id": 400},
    Generation.K2_THINKING: {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
    Generation.K25: {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {"model_type": "kimi_k2", "eos_token_id": 402},
    },
}
SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather.\nMetric.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "unit": {"enum": ["C", "F"], "default": "C"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7, "description": "How many"},
                "city": {"type": "string", "description": "City name"},
            },
        },
    },
}
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
    {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "call",
        "tool_calls": [
            {"id": "functions.get_weather:0", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}},
            {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
        ],
    },
    {"role": "tool", "name": "get_weather", "tool_call_id": "functions.get_weather:0", "content": "21"},
]
CALLS = (
    "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city":"Rome"}<|tool_call_end|>'
    '<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
    "<|tool_calls_section_end|>"
)
TYPESCRIPT = """# Tools

## functions
namespace functions {
// Current weather.
// Metric.
type get_weather = (_: {
  // City name
  city: string,
  // How many
  // maximum: 7, minimum: 1
  days?: number,
  // Default: "C"
  unit?: "C" | "F"
}) => any;
}
"""


def turns(first, second):
    """CONVERSATION with what comes before each of the two answers."""
    return (
        f"<|im_user|>user<|im_middle|>Hi<|im_end|>{ASSISTANT}{first}Hello<|im_end|>"
        f"<|im_user|>user<|im_middle|>Weather?<|im_end|>{ASSISTANT}{second}{CALLS}<|im_end|>"
        "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\n21<|im_end|>"
    )


def declared(text):
    return f"<|im_system|>tool_declare<|im_middle|>{text}<|im_end|>"


def compact(value, sort_keys):
    return json.dumps(value, separators=(",", ":"), sort_keys=sort_keys)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    ranks = trained_ranks(400)
    folders = {}
    for generation, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp("kimi") / "files"
        folders[generation] = write_kimi_tokenizer(folder, ranks, thinks=generation != Generation.K2)
        (folder / "config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture(scope="module")
def tokenizers(checkpoints):
    return {generation: Tokenizer.from_checkpoint(folder) for generation, folder in checkpoints.items()}


@pytest.mark.parametrize(
    ("generation", "switches", "expected"),
    [
        (Generation.K2, {}, SYSTEM + turns("", "") + ASSISTANT),
        (Generation.K2_THINKING, {}, SYSTEM + turns("<think></think>", "<think>call</think>") + ASSISTANT),
        (Generation.K25, {}, turns("<think></think>", "<think>call</think>") + ASSISTANT + "<think>"),
        (
            Generation.K25,
            {"thinking": False},
            turns("<think></think>", "<think></think>") + ASSISTANT + "<think></think>",
        ),
        (
            Generation.K25,
            {"thinking": True, "preserve_thinking": True},
            turns("<think>greet</think>", "<think>call</think>") + ASSISTANT + "<think>",
        ),
        (Generation.K2, {"tools": [TOOL]}, declared(compact([TOOL], False)) + SYSTEM + turns("", "") + ASSISTANT),
        (
            Generation.K2_THINKING,
            {"tools": [TOOL]},
            declared(compact([TOOL], True)) + SYSTEM + turns("<think></think>", "<think>call</think>") + ASSISTANT,
        ),
        (
            Generation.K25,
            {"tools": [TOOL]},
            declared(TYPESCRIPT) + turns("<think></think>", "<think>call</think>") + ASSISTANT + "<think>",
        ),
    ],
)
def test_conversations_without_a_template_of_the_checkpoint(tokenizers, generation, switches, expected):
    tokenizer = tokenizers[generation]
    assert tokenizer.kimi == generation
    ids = tokenizer.encode_chat(CONVERSATION, **switches)
    assert tokenizer.decode(ids, skip_special=False) == expected
    if generation != Generation.K2:  # Its vocabulary lacks <think>, which is then no special token.
        assert ids == tokenizer.encode(expected)


def test_a_system_message_replaces_the_default_one(tokenizers):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for tokenizer in tokenizers.values():
        text = tokenizer.decode(tokenizer.encode_chat(messages), skip_special=False)
        assert text.startswith("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user")


def test_stop_ids(tokenizers):
    assert tokenizers[Generation.K2].eos_token_ids == (400, 401, 402, 409)
    assert tokenizers[Generation.K25].eos_token_ids == (401, 402, 409)


def test_a_template_of_the_checkpoint_gets_the_declarations(checkpoints, tmp_path):
    folder = write_kimi_tokenizer(
        tmp_path / "own",
        trained_ranks(400),
        chat_template="{{ tools_ts_str }}|{{ tools | tojson }}|{{ thinking }}{{ preserve_thinking is defined }}",
    )
    (folder / "config.json").write_text(json.dumps(CONFIGS[Generation.K25]))
    tokenizer = Tokenizer.from_checkpoint(folder)
    ids = tokenizer.encode_chat(CONVERSATION, tools=[TOOL], thinking=False)
    assert tokenizer.decode(ids) == f"{TYPESCRIPT}|{json.dumps([TOOL], sort_keys=True)}|FalseFalse"


def test_tools_without_a_declaration_are_given_as_json(tokenizers):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"oneOf": [{}]}}}}}
    tokenizer = tokenizers[Generation.K25]
    text = tokenizer.decode(tokenizer.encode_chat(CONVERSATION[:1], tools=[tool]), skip_special=False)
    assert text.startswith(declared(compact([tool], True)))


def function(parameters, **others):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **others}}]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, "type f = (_: {}) => any;"),
        (
            {"properties": {"b": True, "a": {"type": "array", "items": {"type": "number", "minimum": 0}}}},
            "type f = (_: {\n  a?: Array<\n    // minimum: 0\n    number\n  >,\n  b?: any\n}) => any;",
        ),
        (
            {"properties": {"x": {"anyOf": [{"type": "null"}, {"type": ["integer", "array"]}]}}, "required": ["x"]},
            "type f = (_: {\n  x: null | number | Array<any>\n}) => any;",
        ),
        (
            {"additionalProperties": {"type": "object", "additionalProperties": False}},
            "type f = (_: {\n  [k: string]: {\n    [k: string]: never\n  }\n}) => any;",
        ),
        (
            {
                "$defs": {"Node": {"description": "A node", "properties": {"to": {"$ref": "#/$defs/Node"}}}},
                "properties": {"root": {"$ref": "#/$defs/Node", "default": None}, "again": {"$ref": "#"}},
            },
            None,
        ),
        (
            {
                "$defs": {"Node": {"type": "object", "properties": {"to": {"$ref": "#/$defs/Node"}}}},
                "properties": {"root": {"$ref": "#/$defs/Node"}, "again": {"$ref": "#"}},
                "required": ["root"],
            },
            "interface parameters {\n  root: Node,\n  again?: parameters\n}\n"
            "interface Node {\n  to?: Node\n}\ntype f = (_: parameters) => any;",
        ),
        ({"properties": {"x": {"type": "string", "enum": ["a", None, 1]}}}, None),
        ({"properties": {"x": {"$ref": "https://example.com/x"}}}, None),
    ],
)
def test_declarations(parameters, expected):
    """Texts of the published encoder."""
    framed = None if expected is None else f"# Tools\n\n## functions\nnamespace functions {{\n{expected}\n}}\n"
    assert as_typescript(function(parameters)) == framed


@pytest.mark.parametrize(
    ("messages", "variables", "message"),
    [
        (["Hi"], {}, r"messages\[0\]: found 'Hi', expected an object"),
        ([{"content": "Hi"}], {}, r"messages\[0\].role: found None, expected its name"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            {},
            r"messages\[0\].content\[1\].type: found 'image_url', expected 'text'",
        ),
        (
            [{"role": "user", "content": 3}],
            {},
            r"messages\[0\].content: found 3, expected text or",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r"content\[0\].text: found None, expected text"),
        (
            [],
            {"tools": function({"type": "strin"})},
            r"tools\[0\].function.parameters.type: found 'strin'",
        ),
        (
            [],
            {"tools": function({"properties": {"a": {"type": "array", "items": [1]}}})},
            r"tools\[0\].function.parameters.properties.a.items: found \[1\], which is no JSON schema",
        ),
        ([], {"tools": function([])}, r"parameters: found \[\], expected a JSON schema"),
        ([], {"tools": function({}, name="a b")}, r"function.name: found 'a b', expected letters, digits"),
        ([], {"tools": function({}, description=1)}, r"function.description: found 1, expected text"),
        ([], {"tools": [{"type": "_plugin"}]}, r"tools\[0\].type: found '_plugin', expected 'function'"),
        ([], {"tools": [{"type": "function"}]}, r"tools\[0\].function: found None, expected an object"),
        ([], {"tools": {"a": 1}}, "tools: found {'a': 1}, expected a list"),
        ([], {"thinking": "no"}, "thinking: found 'no', expected true or false"),
        ([], {"preserve_thinking": None}, "preserve_thinking: found None, expected true or false"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tokenizers, messages, variables, message):
    with pytest.raises(ValueError, match=message) as caught:
        tokenizers[Generation.K25].encode_chat(messages, **variables)
    assert "\n" not in str(caught.value)


def test_schemas_nested_without_end_are_refused(tokenizers):
    schema = {}
    for _ in range(3000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        tokenizers[Generation.K25].encode_chat([], tools=function(schema))
