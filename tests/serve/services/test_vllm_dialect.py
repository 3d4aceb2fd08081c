"""Requests of the gateway's dialect, translated."""

import pytest
from google.protobuf import json_format
from grpc import StatusCode
from smg_grpc_proto import vllm_engine_pb2

from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import RequestStatistics, RoundCounts
from jaxspec.serve.requests.streams import Ending, Piece
from jaxspec.serve.runtime.refusal import Refusal
from jaxspec.serve.services.vllm_dialect import FIELDS, complete, to_request


def theirs(ids=(1, 2), **sampling):
    request = vllm_engine_pb2.GenerateRequest(request_id="r")
    request.tokenized.input_ids.extend(ids)
    json_format.ParseDict(sampling, request.sampling_params)
    return request


def ours(request):
    return json_format.MessageToDict(to_request(request), preserving_proto_field_name=True)


def test_what_the_gateway_always_sends():
    request = theirs(n=1, top_p=1, repetition_penalty=1, skip_special_tokens=True, spaces_between_special_tokens=True)
    request.stream = True
    request.tokenized.original_text = "Hello"
    assert ours(request) == {
        "request_id": "r",
        "token_ids": {"ids": [1, 2]},
        "sampling": {"top_p": 1.0, "choices": 1},
        "output": {"text": False, "skip_special_tokens": True},
    }


VALUES = {
    "temperature": 0,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 3,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"3": -1.0},
    "n": 2,
    "max_tokens": 7,
    "min_tokens": 2,
    "stop": ["x", "y"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "logprobs": 0,
    "prompt_logprobs": 2,
    "json_schema": "{}",
    "regex": "a",
    "grammar": "start: A",
    "json_object": True,
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_arrives(name):
    found = ours(theirs(**{name: VALUES[name]}))
    block, field = FIELDS[name].split(".")
    assert found[block][field] == VALUES[name]


def test_zero_is_unset_where_the_proto_can_not_tell():
    assert "sampling" not in ours(theirs(top_p=0, top_k=0, min_p=0, n=0))
    assert ours(theirs(temperature=0))["sampling"] == {"temperature": 0.0}


def test_minus_one_keeps_all_tokens():
    assert ours(theirs(top_k=2**32 - 1))["sampling"] == {"top_k": 0}


def test_negative_seeds_are_seeds():
    assert ours(theirs(seed=-1))["sampling"] == {"seed": 2**32 - 1}


@pytest.mark.parametrize(
    ("fields", "sampling", "code", "name"),
    [
        ({"mm_inputs": {}}, {}, StatusCode.UNIMPLEMENTED, "mm_inputs"),
        ({"kv_transfer_params_json": "{}"}, {}, StatusCode.UNIMPLEMENTED, "kv_transfer_params_json"),
        ({"data_parallel_rank": 0}, {}, StatusCode.UNIMPLEMENTED, "data_parallel_rank"),
        ({}, {"truncate_prompt_tokens": 1}, StatusCode.UNIMPLEMENTED, "sampling_params.truncate_prompt_tokens"),
        ({}, {"choice": {"choices": ["a"]}}, StatusCode.UNIMPLEMENTED, "sampling_params.choice"),
        ({}, {"structural_tag": "x"}, StatusCode.UNIMPLEMENTED, "sampling_params.structural_tag"),
        ({}, {"stop_token_ids": [2**31]}, StatusCode.INVALID_ARGUMENT, "sampling_params.stop_token_ids"),
        ({}, {"max_tokens": 2**31}, StatusCode.INVALID_ARGUMENT, "sampling_params.max_tokens"),
        ({"tokenized": {"input_ids": [2**31]}}, {}, StatusCode.INVALID_ARGUMENT, "tokenized"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(fields, sampling, code, name):
    request = theirs(**sampling)
    json_format.ParseDict(fields, request)
    with pytest.raises(Refusal, match=f"^{name}: ") as raised:
        to_request(request)
    assert (raised.value.code, raised.value.field) == (code, name)


def test_the_end_carries_what_speculation_did():
    statistics = RequestStatistics()
    for accepted in (2, 0):
        statistics.record(RoundCounts(accepted + 1, accepted, 6), depth=3)
    ending = Ending(FinishReason.STOP, stop_string="x")
    message = complete(Piece(1, tokens=[5, 6, 7, 8]), ending, range(9), statistics).complete
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == {
        "output_ids": [5, 6, 7, 8],
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "index": 1,
        "matched_stop_str": "x",
        "spec_accepted_tokens": 2,
        "spec_draft_tokens": 12,
    }
    ending = Ending(FinishReason.STOP, stop_token_id=5)
    assert complete(Piece(0, tokens=[5]), ending, range(9), statistics).complete.matched_token_id == 5
