"""Whether the server lives and whether it takes requests: one state, told through grpc.health.v1."""

import asyncio
import enum
from collections.abc import Awaitable, Sequence

from grpc import StatusCode
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from jaxspec.serve.runtime.engine_thread import EngineThread
from jaxspec.serve.runtime.refusal import Refusal

RETRY_SECONDS = 5.0


class State(enum.Enum):
    """Where the server stands; what a new request is told in each state."""

    LOADING = "server: loading the model; try again later"
    SERVING = ""
    DRAINING = "server: shutting down, takes no new requests; try another"
    STUCK = "engine: no progress for a while; try another server"
    FAILED = "engine: ended by a fault; try another server"


class Health:
    """The server's state, and its health service.

    The empty service name tells liveness: NOT_SERVING once the engine is stuck or gone, and a restart would help. The
    services' names tell readiness: SERVING while requests are taken.

    Args:
      services: full names that tell readiness.
    """

    def __init__(self, services: Sequence[str]):
        self.servicer = health.aio.HealthServicer()
        self._services = services
        self._loaded = self._draining = self._stuck = self._failed = False

    @property
    def state(self) -> State:
        """The gravest of the states that apply."""
        if self._failed:
            return State.FAILED
        if not self._loaded:
            return State.LOADING
        if self._draining:
            return State.DRAINING
        return State.STUCK if self._stuck else State.SERVING

    @property
    def refusal(self) -> Refusal | None:
        """What a new request is refused with, if it is."""
        if self.state is State.SERVING:
            return None
        return Refusal(StatusCode.UNAVAILABLE, self.state.value, retry_after=RETRY_SECONDS)

    # Each takes effect at once; awaiting tells the health service's clients.

    def loading(self) -> Awaitable[None]:
        """Says that the server is up and the model is not."""
        return self._tell()

    def loaded(self) -> Awaitable[None]:
        """Says that the engine is ready."""
        self._loaded = True
        return self._tell()

    def draining(self) -> Awaitable[None]:
        """Says that no new requests are taken from now on."""
        self._draining = True
        return self._tell()

    def failed(self) -> Awaitable[None]:
        """Says that the engine is gone for good."""
        self._failed = True
        return self._tell()

    async def watch(self, engine: EngineThread, limit: float) -> None:
        """Runs for ever, and counts the engine as stuck while one step takes longer than `limit` seconds."""
        while True:
            stuck = engine.stalled_seconds > limit
            if stuck != self._stuck:
                self._stuck = stuck
                await self._tell()
            await asyncio.sleep(min(1.0, limit / 4))

    async def _tell(self) -> None:
        alive = self.state not in (State.STUCK, State.FAILED)
        await self.servicer.set("", _status(alive))
        for service in self._services:
            await self.servicer.set(service, _status(self.state is State.SERVING))


def _status(good: bool) -> int:
    return HealthCheckResponse.SERVING if good else HealthCheckResponse.NOT_SERVING
