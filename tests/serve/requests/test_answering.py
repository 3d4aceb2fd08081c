"""Requests that can't be answered are refused with the field, what was found and what was expected."""

import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxspec.v1 import admin_pb2
from jaxspec.v1 import generation_pb2 as pb
from tests.support.requests import request
from tests.support.server_process import CONTEXT

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("built", "code", "field", "message"),
    [
        (request(None), INVALID, "prompt", "found none, expected one of text, token_ids, conversation"),
        (request([]), INVALID, "token_ids", "found 0 tokens, expected at least 1"),
        (request(""), INVALID, "text", "found 0 tokens, expected at least 1"),
        (request([258]), INVALID, "token_ids", "found token id 258, expected 0 to 257"),
        (request([-1]), INVALID, "token_ids", "found token id -1, expected 0 to 257"),
        (request([1] * CONTEXT), INVALID, "token_ids", "found 1024 tokens, expected at most 1023 (context limit)"),
        (request("x" * CONTEXT), INVALID, "text", "found 1024 tokens, expected at most 1023 (context limit)"),
        (request("x" * 10_000_000), INVALID, "text", "found 10000000 bytes, expected at most 4092"),
        (request(max_tokens=0), INVALID, "stopping.max_tokens", "found 0, expected 1 to"),
        (
            request(max_tokens=1020),
            INVALID,
            "stopping.max_tokens",
            "found 1020, expected at most 1019 (context of 1024",
        ),
        (request(sampling={"temperature": -1}), INVALID, "sampling.temperature", "found -1.0, expected 0.0 to 100.0"),
        (request(sampling={"temperature": float("nan")}), INVALID, "sampling.temperature", "found nan"),
        (request(sampling={"temperature": float("inf")}), INVALID, "sampling.temperature", "found inf"),
        (request(sampling={"top_k": -1}), INVALID, "sampling.top_k", "found -1, expected 0 to"),
        (request(sampling={"top_p": 0}), INVALID, "sampling.top_p", "found 0.0, expected 1e-06 to 1.0"),
        (request(sampling={"min_p": 2}), INVALID, "sampling.min_p", "found 2.0, expected 0.0 to 1.0"),
        (request(sampling={"choices": 0}), INVALID, "sampling.choices", "found 0, expected 1 to 10"),
        (request(sampling={"choices": 11}), INVALID, "sampling.choices", "found 11, expected 1 to 10"),
        (request(stopping__stop=[""]), INVALID, "stopping.stop", "found 0 characters, expected 1 to 256 in each"),
        (request(stopping__stop=["x" * 257]), INVALID, "stopping.stop", "found 257 characters"),
        (request(stopping__stop=["x"] * 5000), INVALID, "stopping.stop", "found 5000 strings, expected at most 16"),
        (request(stopping__stop_token_ids=[258]), INVALID, "stopping.stop_token_ids", "found token id 258"),
        (
            request(stopping__stop_token_ids=[*range(99)]),
            INVALID,
            "stopping.stop_token_ids",
            "found 100 with the model's",
        ),
        (request(request_id="a b"), INVALID, "request_id", "found 'a b', expected 1 to 128 characters"),
        (request(request_id="x\ny"), INVALID, "request_id", r"found 'x\ny'"),
        (request(request_id="x" * 129), INVALID, "request_id", "expected 1 to 128 characters"),
        (request(output__text=False, output__token_ids=False), INVALID, "output", "found neither text nor token_ids"),
        (request(model="other"), grpc.StatusCode.NOT_FOUND, "model", "found 'other', expected 'tiny'"),
        (
            request(sampling={"repetition_penalty": 0}),
            INVALID,
            "sampling.repetition_penalty",
            "found 0.0, expected 0.01",
        ),
        (
            request(sampling={"presence_penalty": 3}),
            INVALID,
            "sampling.presence_penalty",
            "found 3.0, expected -2.0 to",
        ),
        (request(sampling={"logit_bias": {1: 101}}), INVALID, "sampling.logit_bias", "(1, 101.0)"),
        (request(sampling={"logit_bias": {999: 1}}), INVALID, "sampling.logit_bias", "token id 999, expected 0 to 257"),
        (
            request(sampling={"logit_bias": dict.fromkeys(range(301), 1)}),
            INVALID,
            "sampling.logit_bias",
            "found 301 tokens, expected at most 300",
        ),
        (request(max_tokens=None, stopping__min_tokens=1020), INVALID, "stopping.min_tokens", "expected 0 to 1019"),
        (request(stopping__min_tokens=25), INVALID, "stopping.min_tokens", "found 25, expected 0 to 24"),
        (request(output__logprobs=21), INVALID, "output.logprobs", "found 21, expected 0 to 20"),
        (request(output__prompt_logprobs=-1), INVALID, "output.prompt_logprobs", "found -1, expected 0 to 20"),
        (request(structured_output__regex="a("), INVALID, "structured_output", "invalid regex"),
        (request(structured_output__json_schema="{"), INVALID, "structured_output", "at line 1"),
        (request(structured_output__json_schema='{"enum": []}'), INVALID, "structured_output", "Unsatisfiable"),
        (request(structured_output__regex=r"[^\s\S]"), INVALID, "structured_output", "no answer can meet"),
        (request(structured_output__regex="(" * 20_000), INVALID, "structured_output", "(((( … (((("),
        (request(structured_output__grammar="start: x"), INVALID, "structured_output", "x"),
        (
            request(structured_output__regex="a" * 300_000),
            INVALID,
            "structured_output.regex",
            "found 300000 characters, expected 1 to 65536",
        ),
        (
            request(structured_output__regex="a", stopping__ignore_eos=True),
            INVALID,
            "stopping.ignore_eos",
            "found True, expected False",
        ),
        (request(speculation__budget=7), INVALID, "speculation.budget", "found 7, expected at most the engine's 6"),
        (
            request(speculation__enabled=False, speculation__budget=2),
            INVALID,
            "speculation.budget",
            "found 2, expected 0",
        ),
        (
            request(None, conversation__messages=[{"role": "u", "content": "", "fields_json": "["}]),
            INVALID,
            "conversation.messages[0].fields_json",
            "found no JSON",
        ),
        (
            request(None, conversation__variables_json="[" * 3000),
            INVALID,
            "conversation.variables_json",
            "found no JSON",
        ),
        (
            request(None, conversation__variables_json='{"messages": 1}'),
            INVALID,
            "conversation.variables_json",
            "found the name messages",
        ),
        (
            request(None, conversation__variables_json='{"self": 1}'),
            INVALID,
            "conversation.variables_json",
            "found the name self",
        ),
        (
            request(None, conversation__messages=[{}] * 20_000),
            INVALID,
            "conversation.messages",
            "found 20000, expected at most 16384",
        ),
        (request(None, conversation__variables_json="7"), INVALID, "conversation.variables_json", "found int"),
    ],
)
def test_bad_input_names_field_and_limit(generation, built, code, field, message):
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        generation.Generate(built, timeout=20)
    assert time.monotonic() - began < 10
    assert raised.value.code() == code
    assert raised.value.details().startswith(f"{field}: ")
    assert message in raised.value.details()
    violation = error_details_pb2.BadRequest()
    (detail,) = rpc_status.from_call(raised.value).details
    assert detail.Unpack(violation)
    assert violation.field_violations[0].field == field
    with pytest.raises(grpc.RpcError) as raised:
        list(generation.GenerateStream(pb.GenerateStreamRequest(request=built)))
    assert raised.value.code() == code


def test_the_message_of_a_very_long_value_still_arrives(generation, admin):
    for call in (
        lambda: generation.Generate(request(model="\N{SAILBOAT}" * 100_000)),
        lambda: admin.Abort(admin_pb2.AbortRequest(request_ids=["x" * 100_000])),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        assert ": found '" in raised.value.details()
        assert ", expected " in raised.value.details()


@pytest.mark.parametrize("depth", [900, 1500])
def test_deeply_nested_values_are_refused(generation, depth):
    """Where is up to Python: in the JSON, in the template or in the prompt that it makes."""
    nest = '{"tail": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(grpc.RpcError) as raised:
        generation.Generate(request(None, conversation__variables_json=nest), timeout=20)
    assert raised.value.code() == INVALID
    assert raised.value.details().startswith("conversation")
