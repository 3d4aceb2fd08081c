"""The service `vllm.grpc.engine.VllmEngine`, which the `smg` gateway speaks, over the same engine."""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpc import StatusCode
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxspec.serve.requests.answering import Answerer
from jaxspec.serve.requests.open_requests import OpenRequests
from jaxspec.serve.requests.served_model import ServedModel
from jaxspec.serve.requests.streams import Piece
from jaxspec.serve.runtime.health import Health, State
from jaxspec.serve.runtime.refusal import Refusal
from jaxspec.serve.services.vllm_dialect import chunk, complete, to_request

CHUNK_BYTES = 64 << 10


class VllmService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Speaks the dialect for one engine.

    Args:
      answerer: answers.
      model: gives what is served, or raises Refusal while there is nothing yet.
      requests: those that are open.
      health: the server's state.
      target: folder of the converted target, whose tokenizer the gateway asks for.
    """

    def __init__(
        self,
        answerer: Answerer,
        model: Callable[[], ServedModel],
        requests: OpenRequests,
        health: Health,
        target: Path,
    ):
        self._answerer, self._model, self._requests = answerer, model, requests
        self._health, self._target = health, target
        self._began = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Sends chunks where the request streams, then one complete message for each choice."""
        async with self._answerer.answering(to_request(request), context) as answering:
            # On its own: gRPC can't tell a client that takes nothing how its call ended before this is out.
            await context.send_initial_metadata(())
            wholes = [Piece(choice.index) for choice in answering.stream.choices]
            async for piece in self._answerer.pieces(answering):
                whole = wholes[piece.choice]
                whole.tokens += piece.tokens
                if not request.stream:
                    whole.log_probs += piece.log_probs
                    whole.prompt_log_probs += piece.prompt_log_probs
                elif piece.tokens:
                    await self._answerer.write(context, chunk(piece, answering.prompt, len(whole.tokens)))
                if piece.ending is not None:
                    statistics = answering.stream.choices[piece.choice].statistics
                    await self._answerer.write(context, complete(whole, piece.ending, answering.prompt, statistics))

    async def Embed(self, request: Any, context: Any) -> Any:
        """Refuses, since a generating model embeds nothing."""
        raise Refusal(StatusCode.UNIMPLEMENTED, "Embed: this server generates only")

    async def HealthCheck(self, request: Any, context: Any) -> pb.HealthCheckResponse:
        """Tells whether requests are taken."""
        state = self._health.state
        return pb.HealthCheckResponse(healthy=state is State.SERVING, message=state.value)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends requests; ids that are not open are passed over."""
        self._requests.abort(request.request_ids)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        """Tells name, sizes and special tokens."""
        model = self._model()
        config = model.engine.target.config
        return pb.GetModelInfoResponse(
            model_path=str(self._target),
            tokenizer_path=str(self._target),
            served_model_name=model.name,
            is_generation=True,
            max_context_length=model.max_context,
            max_req_input_len=model.max_context - 1,
            vocab_size=config.vocab_size,
            model_type=config.family,
            eos_token_ids=model.engine.eos_token_ids,
            default_sampling_params_json=json.dumps(model.default_sampling),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        """Tells how much runs, and for how long the server has."""
        model = self._model()
        return pb.GetServerInfoResponse(
            active_requests=len(self._requests),
            uptime_seconds=time.monotonic() - self._began,
            server_type="jaxspec",
            data_parallel_size=1,
            model_dtype=model.engine.dtype,
            max_num_seqs=model.engine.config.slots,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Any) -> pb.GetLoadsResponse:
        """Tells how busy the engine is."""
        engine = self._model().engine
        load, page_size = engine.load, engine.config.page_size
        rank = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.pages_used * page_size,
            max_total_num_tokens=load.pages * page_size,
            token_usage=load.pages_used / load.pages,
            utilization=load.running / engine.config.slots,
            max_running_requests=engine.config.slots,
        )
        return pb.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=1, loads=[rank])

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        """Sends a zip of the tokenizer's files, in parts; its digest comes with the last."""
        data = await asyncio.to_thread(tokenizer_zip, self._target)
        for start in range(0, len(data), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(data)
            digest = hashlib.sha256(data).hexdigest() if last else ""
            part = common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=digest)
            await self._answerer.write(context, part)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """Refuses, since no prefixes are announced."""
        raise Refusal(StatusCode.UNIMPLEMENTED, "SubscribeKvEvents: this server announces no prefixes")

    async def FlushCache(self, request: Any, context: Any) -> Any:
        """Refuses: this is for operators, at jaxspec.v1.AdminService."""
        raise _for_operators("FlushCache")

    async def StartProfile(self, request: Any, context: Any) -> Any:
        """Refuses: this is for operators, at jaxspec.v1.AdminService."""
        raise _for_operators("StartProfile")

    async def StopProfile(self, request: Any, context: Any) -> Any:
        """Refuses: this is for operators, at jaxspec.v1.AdminService."""
        raise _for_operators("StopProfile")


def tokenizer_zip(target: Path) -> bytes:
    """Packs the files that a client builds the target's tokenizer from; equal files give equal bytes."""
    config = json.loads((target / "jaxspec.json").read_text(encoding="utf-8"))["config"]
    files = {path.name: path.read_bytes() for path in (target / "tokenizer").iterdir() if path.is_file()}
    files.setdefault("config.json", json.dumps(config).encode())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _for_operators(name: str) -> Refusal:
    return Refusal(StatusCode.UNIMPLEMENTED, f"{name}: found on this port, expected at jaxspec.v1.AdminService")
