"""VllmService of a real server process, called as a gateway calls it."""

import hashlib
import io
import time
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxspec.v1 import model_pb2
from tests.support.requests import request
from tests.support.server_process import SLOTS


@pytest.fixture(scope="module")
def gateway(server):
    """A stub of what a gateway speaks."""
    port = server.wait_for(r"listening on .* vllm on port (\d+)").group(1)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def gateway_request(ids, max_tokens=24, **fields):
    sampling = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, **fields)
    return vllm_engine_pb2.GenerateRequest(
        request_id=f"g-{time.monotonic_ns()}",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=ids),
        sampling_params=sampling,
    )


def test_a_gateway_gets_the_same_answer(generation, model, gateway):
    ids = model.Tokenize(model_pb2.TokenizeRequest(text="ab" * 20)).token_ids
    expected = generation.Generate(request("ab" * 20)).choices[0]
    asked = gateway_request(ids)
    (whole,) = gateway.Generate(asked)
    assert list(whole.complete.output_ids) == list(expected.token_ids)
    assert (whole.complete.finish_reason, whole.complete.prompt_tokens, whole.complete.completion_tokens) == (
        "length",
        40,
        24,
    )
    statistics = expected.ending.speculation
    assert whole.complete.spec_accepted_tokens == statistics.accepted_draft_tokens
    assert whole.complete.spec_draft_tokens == statistics.draft_tokens
    asked.stream = True
    *chunks, last = gateway.Generate(asked)
    assert [token for part in chunks for token in part.chunk.token_ids] == list(expected.token_ids)
    assert len(chunks) > 5
    assert chunks[-1].chunk.completion_tokens == 24
    assert last == whole


def test_a_gateway_learns_what_it_asks_at_start(gateway, folders):
    assert gateway.HealthCheck(vllm_engine_pb2.HealthCheckRequest()).healthy
    info = gateway.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.served_model_name, info.vocab_size, info.is_generation) == ("tiny", 258, True)
    assert gateway.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest()).max_num_seqs == SLOTS
    (rank,) = gateway.GetLoads(vllm_engine_pb2.GetLoadsRequest()).loads
    assert (rank.num_running_reqs, rank.max_running_requests) == (0, SLOTS)
    parts = list(gateway.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(archive.namelist())
    assert archive.read("tokenizer.json") == (folders[0] / "tokenizer" / "tokenizer.json").read_bytes()


def test_a_gateway_aborts_by_id(gateway):
    asked = gateway_request([1, 2], 900)
    asked.stream = True
    call = gateway.Generate(asked)
    next(call)
    gateway.Abort(vllm_engine_pb2.AbortRequest(request_ids=[asked.request_id, "unknown"]))
    *_, last = call
    assert last.complete.finish_reason == "abort"
    assert last.complete.completion_tokens < 900


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
def test_a_gateway_is_told_what_is_not_for_it(gateway, name, message):
    with pytest.raises(grpc.RpcError) as raised:
        list(getattr(gateway, name)(message))
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details().startswith(f"{name}: ")
