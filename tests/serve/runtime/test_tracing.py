"""Spans of calls: their parent, their status, and what an answer came to."""

import asyncio

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.serve.runtime.tracing import OpenTelemetry
from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.published import write_byte_tokenizer
from tests.support.scripted_engine import ScriptedEngine, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_spans_tell_what_a_call_came_to(tmp_path):
    write_byte_tokenizer(tmp_path, {"eos_token": "</s>"})
    engine = ScriptedEngine(Tokenizer.from_checkpoint(tmp_path))
    exporter = InMemorySpanExporter()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), stopping=pb.StoppingOptions(max_tokens=10))

    async def run():
        async with serving(engine, OpenTelemetry(exporter, {"jaxspec.model": "tiny"})) as (_, channel, _):
            stub = GenerationServiceStub(channel)
            parent = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
            call = stub.GenerateStream(pb.GenerateStreamRequest(request=request), metadata=parent)
            assert len([event async for event in call]) > 2
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(pb.GenerateRequest())

    asyncio.run(run())
    streamed, refused = exporter.get_finished_spans()
    assert (streamed.name, streamed.kind) == ("jaxspec.v1.GenerationService/GenerateStream", SpanKind.SERVER)
    assert (f"{streamed.context.trace_id:x}", f"{streamed.parent.span_id:x}") == (TRACE.lstrip("0"), PARENT)
    assert streamed.resource.attributes["jaxspec.model"] == "tiny"
    found = streamed.attributes
    assert (found["rpc.service"], found["rpc.method"]) == ("jaxspec.v1.GenerationService", "GenerateStream")
    assert found["rpc.grpc.status_code"] == 0
    assert (found["jaxspec.prompt_tokens"], found["jaxspec.completion_tokens"]) == (2, 10)
    assert found["jaxspec.tau"] == 2.0
    assert refused.parent is None
    assert (refused.status.status_code, refused.status.description) == (SpanStatus.ERROR, "INVALID_ARGUMENT")
    assert refused.attributes["rpc.grpc.status_code"] == 3
