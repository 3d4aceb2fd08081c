"""Requests sent to a server at a set concurrency or rate, and what was seen of each."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from jaxspec.serve.client.client import ServerAddress
from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1.generation_pb2_grpc import GenerationServiceStub


@dataclass
class Observation:
    """What its client observed of one request; times are in seconds.

    Attributes:
      began: when it was due to be sent, on the clock of `time.perf_counter`.
      deliveries: when tokens came, and how many.
      ended: when it ended, on the same clock.
      code: name of the status that it ended with.
      rounds, drafted, accepted: what speculation did.
      prompt_tokens, cached_tokens: length of the prompt; how much of it the server's cache held.
    """

    began: float
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    code: str = "OK"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(count for _, count in self.deliveries)

    @property
    def to_first_token(self) -> float:
        """How long the first tokens took, from when the request was due."""
        return self.deliveries[0][0] - self.began

    @property
    def per_token(self) -> float | None:
        """How long a token took after the first delivery; None where nothing came after it."""
        (first, count), (last, _) = self.deliveries[0], self.deliveries[-1]
        return (last - first) / (self.tokens - count) if self.tokens > count else None

    @property
    def between(self) -> list[float]:
        """How long it was from each delivery to the next."""
        times = [moment for moment, _ in self.deliveries]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


Ask = Callable[[pb.GenerateRequest, float], Awaitable[Observation]]


async def closed_loop(
    server: ServerAddress, requests: Sequence[pb.GenerateRequest], concurrency: int
) -> list[Observation]:
    """Keeps `concurrency` requests open until all were answered."""
    waiting = iter(requests)
    observed: list[Observation] = []

    async def client(ask: Ask) -> None:
        for request in waiting:
            observed.append(await ask(request, time.perf_counter()))

    async with server.aio_channel() as channel:
        await asyncio.gather(*(client(_asker(channel, server)) for _ in range(concurrency)))
    return observed


async def open_loop(
    server: ServerAddress, requests: Sequence[pb.GenerateRequest], gaps: Sequence[float]
) -> list[Observation]:
    """Sends each request so many seconds after the one before, however many are open."""
    async with server.aio_channel() as channel:
        ask, due, tasks = _asker(channel, server), time.perf_counter(), []
        for request, gap in zip(requests, gaps, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(_awaited(ask(request, due))))
        return await asyncio.gather(*tasks)


async def _awaited(observed: Awaitable[Observation]) -> Observation:
    return await observed


def _asker(channel: grpc.aio.Channel, server: ServerAddress) -> Ask:
    stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

    async def ask(request: pb.GenerateRequest, due: float) -> Observation:
        observed = Observation(due)
        call = stub.GenerateStream(pb.GenerateStreamRequest(request=request), metadata=server.metadata)
        try:
            async for event in call:
                if event.HasField("delta") and event.delta.token_ids:
                    observed.deliveries.append((time.perf_counter(), len(event.delta.token_ids)))
                elif event.HasField("finished"):
                    speculation = event.finished.ending.speculation
                    observed.rounds, observed.drafted = speculation.rounds, speculation.draft_tokens
                    observed.accepted = speculation.accepted_draft_tokens
                    usage = event.finished.usage
                    observed.prompt_tokens, observed.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            observed.code = error.code().name
        observed.ended = time.perf_counter()
        return observed

    return ask
