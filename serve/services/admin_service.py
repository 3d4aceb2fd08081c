"""AdminService: abort, drain, flush, profile. Who may call it is decided in `serve/runtime/security.py`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc import StatusCode

from jaxspec.engine.engine import Engine
from jaxspec.serve.requests.open_requests import OpenRequests
from jaxspec.serve.runtime.engine_thread import EngineThread
from jaxspec.serve.runtime.health import Health
from jaxspec.serve.runtime.refusal import Refusal, invalid
from jaxspec.v1 import admin_pb2 as pb
from jaxspec.v1.admin_pb2_grpc import AdminServiceServicer

LONGEST_DRAIN = 86400.0
MAX_IDS = 10_000


class AdminService(AdminServiceServicer):
    """Serves operators of one engine.

    Args:
      drain_seconds: how long Drain waits where the call doesn't say.
      profile_folder: where traces go; None refuses to make any.
    """

    def __init__(
        self,
        requests: OpenRequests,
        engine: EngineThread,
        health: Health,
        drain_seconds: float,
        profile_folder: Path | None,
    ):
        self._requests, self._engine, self._health = requests, engine, health
        self._drain_seconds, self._profile_folder = drain_seconds, profile_folder
        self._profiling = False

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends requests."""
        if request.all and request.request_ids:
            raise invalid("request_ids", f"{len(request.request_ids)} with all", "one of the two")
        if len(request.request_ids) > MAX_IDS:
            raise invalid("request_ids", f"{len(request.request_ids)} ids", f"at most {MAX_IDS}")
        wanted = self._requests.ids if request.all else list(request.request_ids)
        if not wanted and not request.all:
            raise invalid("request_ids", "none", "at least one, or all")
        aborted = self._requests.abort(wanted)
        unknown = [request_id for request_id in wanted if request_id not in aborted]
        if unknown and not aborted:
            raise Refusal(StatusCode.NOT_FOUND, f"request_ids: found {unknown[0]!r}, expected an open request's id")
        return pb.AbortResponse(aborted=aborted, unknown=unknown)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Takes no more requests and waits for the open ones."""
        seconds = request.timeout_seconds if request.HasField("timeout_seconds") else self._drain_seconds
        if not 0 <= seconds <= LONGEST_DRAIN:
            raise invalid("timeout_seconds", seconds, f"0 to {LONGEST_DRAIN:g}")
        await self._health.draining()
        await self._requests.drained(seconds)
        return pb.DrainResponse(remaining=len(self._requests))

    async def FlushCache(self, request: Any, context: Any) -> pb.FlushCacheResponse:
        """Forgets the prefixes that no open request uses."""
        await self._run("FlushCache", lambda engine: engine.forget_prefixes())
        return pb.FlushCacheResponse()

    async def StartProfile(self, request: Any, context: Any) -> pb.StartProfileResponse:
        """Begins a trace between two steps of the engine."""
        import jax

        if self._profile_folder is None:
            raise Refusal(
                StatusCode.FAILED_PRECONDITION, "StartProfile: found no folder, expected the server's --profile-dir"
            )
        if self._profiling:
            raise Refusal(StatusCode.FAILED_PRECONDITION, "StartProfile: found a trace running; stop it first")
        folder = self._profile_folder / time.strftime("%Y%m%d-%H%M%S")
        await self._run("StartProfile", lambda engine: jax.profiler.start_trace(str(folder)))
        self._profiling = True
        return pb.StartProfileResponse(folder=str(folder))

    async def StopProfile(self, request: Any, context: Any) -> pb.StopProfileResponse:
        """Ends the trace."""
        import jax

        if not self._profiling:
            raise Refusal(StatusCode.FAILED_PRECONDITION, "StopProfile: found no trace running; start one first")
        await self._run("StopProfile", lambda engine: jax.profiler.stop_trace())
        self._profiling = False
        return pb.StopProfileResponse()

    async def _run(self, name: str, function: Callable[[Engine], object]) -> None:
        try:
            await self._engine.call(function)
        except (OSError, RuntimeError) as error:
            raise Refusal(StatusCode.INTERNAL, f"{name}: {' '.join(str(error).split())}") from error
