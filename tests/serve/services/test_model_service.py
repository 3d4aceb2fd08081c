"""ModelService of a real server process."""

import json

import grpc
import pytest

from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1 import model_pb2
from tests.support.requests import request
from tests.support.server_process import CONTEXT, QUEUE, SLOTS


def test_the_server_says_what_it_is(model):
    info = model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert (info.name, info.family, info.vocab_size, info.max_context) == ("tiny", "llama", 258, CONTEXT)
    assert (info.dtype, info.has_chat_template, list(info.eos_token_ids)) == ("float32", True, [257])
    assert (info.speculation.budget, info.speculation.top_k_cap, info.speculation.draft_length) == (6, 16, 3)
    assert "sampling.top_p" in info.supported_fields
    assert {"speculation.enabled", "speculation.budget"} <= set(info.supported_fields)
    server = model.GetServerInfo(model_pb2.GetServerInfoRequest())
    assert (server.devices, server.device_kind, server.slots, server.queue) == (1, "cpu", SLOTS, QUEUE)
    assert server.state == model_pb2.SERVER_STATE_SERVING
    assert server.uptime_seconds > 0


def test_conversations_are_rendered_by_the_template(generation, model, plain):
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi </s>", "mark": "!"}]
    expected = plain.tokenizer.encode_chat(messages, tail="?")
    conversation = pb.Conversation(
        messages=[
            pb.ChatMessage(role="system", content="Be"),
            pb.ChatMessage(role="user", content="Hi </s>", fields_json=json.dumps({"mark": "!"})),
        ],
        variables_json=json.dumps({"tail": "?"}),
    )
    ids = list(model.Tokenize(model_pb2.TokenizeRequest(conversation=conversation)).token_ids)
    assert ids == expected
    assert expected.count(257) == 0  # what a message spells out ends no turn
    assert model.Detokenize(model_pb2.DetokenizeRequest(token_ids=ids)).text == "s:Beu:Hi </s>!?"
    built = request(None)
    built.conversation.CopyFrom(conversation)
    answer = generation.Generate(built)
    assert answer.usage.prompt_tokens == len(expected)
    assert answer.choices == generation.Generate(request(expected)).choices


@pytest.mark.parametrize("index", [-1, 258])
def test_detokenize_refuses_ids_beyond_the_vocabulary(model, index):
    with pytest.raises(grpc.RpcError) as raised:
        model.Detokenize(model_pb2.DetokenizeRequest(token_ids=[index]))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"token_ids: found {index}, expected 0 to 257" in raised.value.details()
