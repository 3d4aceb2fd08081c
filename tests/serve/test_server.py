"""What goes wrong around an engine: crashes, a step that hangs, readers that stall, clients that leave, shutdown."""

import asyncio
import functools
import socket
import struct

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.serve import server as server_module
from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from tests.support.published import write_byte_tokenizer
from tests.support.scripted_engine import ScriptedEngine, serving

READINESS = "jaxspec.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, {"eos_token": "</s>"})
    return Tokenizer.from_checkpoint(folder)


@pytest.fixture
def engine(tokenizer):
    return ScriptedEngine(tokenizer)


def within(seconds):
    """Runs an async test, but not for ever."""

    def decorate(test):
        @functools.wraps(test)
        def run(*arguments, **named):
            asyncio.run(asyncio.wait_for(test(*arguments, **named), seconds))

        return run

    return decorate


def request(max_tokens=20, ids=(1, 2), **fields):
    built = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **fields)
    if max_tokens is not None:
        built.stopping.max_tokens = max_tokens
    return built


def stream(channel, built, **options):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    return stub.GenerateStream(pb.GenerateStreamRequest(request=built), **options)


async def begun(channel, built, **options):
    """A stream that has brought its first tokens."""
    call = stream(channel, built, **options)
    while not (await call.read()).HasField("delta"):
        pass
    return call


async def generate(channel, built):
    return await generation_pb2_grpc.GenerationServiceStub(channel).Generate(built)


async def rest(call):
    """The events of a stream that are still to come."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def code_of(awaitable):
    """The status that a call ends with, and its message."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable
    return raised.value.code(), raised.value.details()


async def health(channel, service=READINESS):
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status


async def state(channel):
    info = await model_pb2_grpc.ModelServiceStub(channel).GetServerInfo(model_pb2.GetServerInfoRequest())
    return model_pb2.ServerState.Name(info.state).removeprefix("SERVER_STATE_")


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def turned(channel, status):
    """Waits until readiness is `status`."""
    while await health(channel) != status:
        await asyncio.sleep(0.005)


@within(20)
async def test_speculation_asked_of_a_server_without_it_is_refused(engine):
    engine.depth = 0
    async with serving(engine) as (_, channel, _):
        built = request(speculation=pb.SpeculationOptions(enabled=True))
        code, message = await code_of(generate(channel, built))
        assert (code, message.split(":")[0]) == (StatusCode.INVALID_ARGUMENT, "speculation.enabled")
    assert not engine.added


@within(20)
async def test_a_crash_ends_every_stream_and_turns_health(engine, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.5)
    async with serving(engine) as (_, channel, task):
        assert [await health(channel, name) for name in ("", READINESS)] == [SERVING, SERVING]
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        assert (await watch.read()).status == SERVING
        calls = [await begun(channel, request(4000)) for _ in range(2)]
        waiting = asyncio.ensure_future(generate(channel, request()))
        await asyncio.sleep(0.02)
        engine.fault = RuntimeError("secret words")
        for ended in (*map(rest, calls), waiting):
            code, message = await code_of(ended)
            assert (code, message) == (StatusCode.INTERNAL, "engine: ended by a fault; the server's log tells more")
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        assert [await health(channel, name) for name in ("", READINESS)] == [NOT_SERVING, NOT_SERVING]
        assert await state(channel) == "FAILED"
        code, message = await code_of(generate(channel, request()))
        assert (code, message) == (StatusCode.UNAVAILABLE, "engine: ended by a fault; try another server")
        assert "secret words" in caplog.text
        assert await task == 1


@within(20)
async def test_no_request_is_lost_in_a_crash(engine, monkeypatch, caplog):
    """Requests keep coming while the engine ends; each gets a status."""
    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.5)
    async with serving(engine) as (_, channel, _):
        calls = []
        for n in range(200):
            if n == 100:
                engine.fault = RuntimeError("now")
            calls.append(asyncio.ensure_future(generate(channel, request(4000))))
            await asyncio.sleep(0)
        codes = {code for code, _ in await asyncio.gather(*map(code_of, calls))}
        assert codes == {StatusCode.INTERNAL, StatusCode.UNAVAILABLE}


@within(20)
async def test_a_hanging_step_turns_health_until_it_ends(engine):
    async with serving(engine, stuck_seconds=0.2) as (_, channel, _):
        call = await begun(channel, request(600))
        engine.gate.clear()
        await turned(channel, NOT_SERVING)
        assert await health(channel, "") == NOT_SERVING
        assert await state(channel) == "STUCK"
        assert (await code_of(generate(channel, request())))[0] == StatusCode.UNAVAILABLE
        engine.gate.set()
        await turned(channel, SERVING)
        assert (await rest(call))[-1].finished.usage.completion_tokens == 600


@within(20)
async def test_compiling_is_not_hanging(engine):
    async with serving(engine, stuck_seconds=0.05) as (_, channel, _):
        call = await begun(channel, request(600))
        engine.compiling = "decode"
        engine.gate.clear()
        await asyncio.sleep(0.3)
        assert await health(channel) == SERVING
        engine.gate.set()
        call.cancel()


@within(20)
async def test_an_idle_engine_is_not_hanging(engine):
    async with serving(engine, stuck_seconds=0.05) as (_, channel, _):
        await generate(channel, request())
        await asyncio.sleep(0.3)
        assert await health(channel) == SERVING


@within(20)
async def test_an_odd_error_of_one_request_harms_no_other(engine):
    async with serving(engine) as (_, channel, _):
        call = await begun(channel, request(400))
        code, message = await code_of(generate(channel, request(ids=[7])))
        assert (code, message) == (StatusCode.INTERNAL, "engine: refused the request with TypeError")
        assert (await rest(call))[-1].finished.usage.completion_tokens == 400


# Clients that leave


@within(20)
@pytest.mark.parametrize("unary", [False, True])
async def test_a_cancelled_call_is_aborted_by_the_next_step(engine, unary):
    async with serving(engine) as (_, channel, _):
        if unary:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request(4000))
            await until(lambda: bool(engine.added))
        else:
            call = await begun(channel, request(4000))
        engine.pause = 0.05
        at = engine.steps
        call.cancel()
        await until(lambda: not engine.has_work)
        ((aborted, step),) = engine.aborted
        assert aborted == 1
        assert step <= at + 2
        assert engine.steps <= step + 1


@within(20)
async def test_answers_that_are_not_complete_are_counted(engine, monkeypatch):
    def finished(server):
        families = {family.name: family for family in server._metrics._own.collect()}
        samples = families["jaxspec_request_success"].samples
        return {s.labels["finished_reason"]: s.value for s in samples if s.name.endswith("_total")}

    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.1)
    async with serving(engine) as (server, channel, _):
        call = await begun(channel, request(4000, sampling=pb.SamplingOptions(choices=2)))
        call.cancel()
        await until(lambda: finished(server) == {"abort": 2})
        await generate(channel, request())
        call = await begun(channel, request(4000))
        engine.fault = RuntimeError("fault")
        await code_of(rest(call))
        await until(lambda: finished(server) == {"abort": 2, "length": 1, "error": 1})


@within(20)
async def test_a_request_that_waits_can_be_cancelled(engine):
    async with serving(engine) as (_, channel, _):
        running = [await begun(channel, request(4000)) for _ in range(2)]
        waiting = stream(channel, request(4000))
        await waiting.read()
        await until(lambda: engine.load.waiting == 1)
        waiting.cancel()
        await until(lambda: bool(engine.aborted))
        assert [request_id for request_id, _ in engine.aborted] == [3]
        for call in running:
            call.cancel()


@within(20)
async def test_a_disconnected_client_is_aborted(engine):
    async with serving(engine) as (server, _, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as other:
            await begun(other, request(4000))
        await until(lambda: not engine.has_work)


@within(20)
async def test_deadlines_of_client_and_server(engine):
    async with serving(engine, max_request_seconds=0.3) as (_, channel, _):
        code, _ = await code_of(rest(await begun(channel, request(4000), timeout=0.1)))
        assert code == StatusCode.DEADLINE_EXCEEDED
        code, message = await code_of(rest(await begun(channel, request(4000))))
        assert code == StatusCode.DEADLINE_EXCEEDED
        assert "took longer than 0.3 s" in message
        await until(lambda: not engine.has_work)
        assert len(engine.aborted) == 2


# A reader that stalls


def frame(kind, flags, stream_id, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def headers(**names):
    """HTTP/2 header block of plain literals."""
    block = b""
    for name, value in names.items():
        for text in (name.replace("_", "-").replace("pseudo-", ":"), value):
            block += (b"\0" if text != value else b"") + bytes([len(text)]) + text.encode()
    return block


class DeafClient:
    """Asks for a stream over bare HTTP/2 and gives no window to answer into."""

    def __init__(self, port, built):
        self.socket = socket.create_connection(("127.0.0.1", port))
        message = pb.GenerateStreamRequest(request=built).SerializeToString()
        block = headers(
            pseudo_method="POST",
            pseudo_scheme="http",
            pseudo_path="/jaxspec.v1.GenerationService/GenerateStream",
            pseudo_authority="here",
            te="trailers",
            content_type="application/grpc",
        )
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, struct.pack(">HI", 4, 0))  # SETTINGS_INITIAL_WINDOW_SIZE = 0
            + frame(1, 4, 1, block)
            + frame(0, 1, 1, b"\0" + struct.pack(">I", len(message)) + message)
        )

    def listen(self):
        """Gives the stream a window, and returns what comes."""
        self.socket.sendall(frame(8, 0, 1, struct.pack(">I", 1 << 20)))
        self.socket.settimeout(5)
        data = b""
        while b"grpc-message" not in data:
            data += self.socket.recv(65536)
        return data


@within(30)
async def test_a_stalled_reader_is_dropped_and_told(engine):
    async with serving(engine, stalled_seconds=0.3) as (server, channel, _):
        client = await asyncio.to_thread(DeafClient, server.port, request(4000))
        await until(lambda: engine.has_work)
        other = await begun(channel, request(300))
        await until(lambda: bool(engine.aborted))
        assert [request_id for request_id, _ in engine.aborted] == [1]
        assert (await rest(other))[-1].finished.usage.completion_tokens == 300
        await until(lambda: not engine.has_work)
        assert len(server._requests) == 0
        data = await asyncio.to_thread(client.listen)
        assert b"the client took nothing for 0.3 s" in data
        client.socket.close()


@within(30)
async def test_what_a_slow_reader_missed_comes_in_one_piece(engine):
    async with serving(engine, stalled_seconds=10) as (server, _, _):
        client = await asyncio.to_thread(DeafClient, server.port, request(4000))
        await until(lambda: len(engine.added) == 1)
        await until(lambda: not engine.has_work)
        client.socket.sendall(frame(8, 0, 1, struct.pack(">I", 1 << 20)))
        client.socket.settimeout(5)
        data = b""
        while b"grpc-status" not in data:
            data += await asyncio.to_thread(client.socket.recv, 65536)
        assert (b"abcdefghijklmnopqrstuvwxyz" * 150) in data
        client.socket.close()


# Shutdown


@within(20)
async def test_stopping_drains(engine):
    async with serving(engine) as (server, channel, task):
        call = await begun(channel, request(1500))
        server.stop()
        await turned(channel, NOT_SERVING)
        assert await health(channel, "") == SERVING
        assert await state(channel) == "DRAINING"
        code, message = await code_of(generate(channel, request()))
        assert (code, message.split(",")[0]) == (StatusCode.UNAVAILABLE, "server: shutting down")
        assert (await rest(call))[-1].finished.usage.completion_tokens == 1500
        assert await task == 0


@within(20)
@pytest.mark.parametrize("twice", [False, True])
async def test_stopping_does_not_wait_for_ever(engine, twice):
    async with serving(engine, drain_seconds=60 if twice else 0.1) as (server, channel, task):
        call = await begun(channel, request(4000))
        server.stop()
        if twice:
            server.stop()
        code, message = await code_of(rest(call))
        assert (code, message) == (StatusCode.UNAVAILABLE, "server: shut down before the answer was complete")
        assert await task == 0
        await until(lambda: engine.aborted)


# What the engine is asked for


@within(20)
async def test_what_is_unset_comes_from_the_model(engine):
    async with serving(engine, default_sampling={"temperature": 0.5, "top_k": 3}) as (_, channel, _):
        await generate(channel, request(None, sampling=pb.SamplingOptions(top_k=0)))
        (sampling,) = engine.added
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 0, 1.0, 4094)


@within(20)
async def test_a_stop_string_aborts_at_once(engine):
    async with serving(engine) as (_, channel, _):
        built = request(4000)
        built.stopping.stop.append("yzab")
        answer = await generate(channel, built)
        (choice,) = answer.choices
        assert choice.text == "abcdefghijklmnopqrstuvwx"
        assert choice.ending.stop_string == "yzab"
        assert answer.usage.completion_tokens == 28
        # The rounds that belong to the answer, however far the engine had run.
        assert choice.ending.speculation.rounds == 14
        await until(lambda: not engine.has_work)
        assert engine.steps < 100
