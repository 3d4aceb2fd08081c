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
class Seen:
    """One request, as its client saw it; times in seconds.

    Attributes:
      began: when it was due to be sent, on the clock of `time.perf_counter`.
      deliveries: when tokens came, and how many.
      ended: when it ended.
      code: of its status.
      rounds, drafted, accepted: what speculation did.
      prompt_tokens, cached_tokens: of the prompt; of those, found in the server's cache.
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
        """That came."""
        return sum(count for _, count in self.deliveries)

    @property
    def to_first_token(self) -> float:
        """From when it was due."""
        return self.deliveries[0][0] - self.began

    @property
    def per_token(self) -> float | None:
        """After the first delivery; None where nothing came after it."""
        (first, count), (last, _) = self.deliveries[0], self.deliveries[-1]
        return (last - first) / (self.tokens - count) if self.tokens > count else None

    @property
    def between(self) -> list[float]:
        """From delivery to delivery."""
        times = [moment for moment, _ in self.deliveries]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


Ask = Callable[[pb.GenerateRequest, float], Awaitable[Seen]]


async def closed_loop(server: ServerAddress, requests: Sequence[pb.GenerateRequest], concurrency: int) -> list[Seen]:
    """Keeps `concurrency` requests open until all were answered."""
    waiting = iter(requests)
    seen: list[Seen] = []

    async def client(ask: Ask) -> None:
        for request in waiting:
            seen.append(await ask(request, time.perf_counter()))

    async with server.aio_channel() as channel:
        await asyncio.gather(*(client(_asker(channel, server)) for _ in range(concurrency)))
    return seen


async def open_loop(server: ServerAddress, requests: Sequence[pb.GenerateRequest], gaps: Sequence[float]) -> list[Seen]:
    """Sends each request so many seconds after the one before, however many are open."""
    async with server.aio_channel() as channel:
        ask, due, tasks = _asker(channel, server), time.perf_counter(), []
        for request, gap in zip(requests, gaps, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(_awaited(ask(request, due))))
        return await asyncio.gather(*tasks)


async def _awaited(seen: Awaitable[Seen]) -> Seen:
    return await seen


def _asker(channel: grpc.aio.Channel, server: ServerAddress) -> Ask:
    stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

    async def ask(request: pb.GenerateRequest, due: float) -> Seen:
        seen = Seen(due)
        call = stub.GenerateStream(pb.GenerateStreamRequest(request=request), metadata=server.metadata)
        try:
            async for event in call:
                if event.HasField("delta") and event.delta.token_ids:
                    seen.deliveries.append((time.perf_counter(), len(event.delta.token_ids)))
                elif event.HasField("finished"):
                    speculation = event.finished.ending.speculation
                    seen.rounds, seen.drafted = speculation.rounds, speculation.draft_tokens
                    seen.accepted = speculation.accepted_draft_tokens
                    usage = event.finished.usage
                    seen.prompt_tokens, seen.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            seen.code = error.code().name
        seen.ended = time.perf_counter()
        return seen

    return ask
