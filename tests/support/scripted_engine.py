"""An engine that writes the alphabet and fails on request, and a server over it in the test's own event loop."""

import asyncio
import contextlib
import string
import threading
import time
from types import SimpleNamespace

import grpc
import numpy as np

from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import EngineLoad, RequestOutput, RequestStatistics, RoundCounts
from jaxspec.serve.runtime.server_config import ServerConfig
from jaxspec.serve.server import Server


class ScriptedEngine:
    """Brings two tokens (a, b, …, z, a, …) a step for every request in a slot.

    Attributes:
      pause: seconds each step takes.
      gate: steps wait while it is cleared.
      fault: raised by the next step.
      added, aborted: what was asked for, in order.
    """

    def __init__(self, tokenizer, slots=2, context=4096):
        self.tokenizer, self.max_context = tokenizer, context
        self.page_count, self.config = context, SimpleNamespace(page_size=1, slots=slots)
        self.depth, self.compiling = 1, None
        self.mesh = SimpleNamespace(size=1, devices=np.array([SimpleNamespace(device_kind="script")]))
        self.pause, self.fault, self.steps = 0.001, None, 0
        self.gate = threading.Event()
        self.gate.set()
        self.added, self.aborted = [], []
        self._letters = tokenizer.encode(string.ascii_lowercase)
        self._open = {}

    @property
    def has_work(self):
        return bool(self._open)

    @property
    def load(self):
        running = min(len(self._open), self.config.slots)
        return EngineLoad(running, len(self._open) - running, running, self.page_count)

    def describe(self):
        return []

    def add(self, prompt, sampling, priority):
        if prompt == [7]:
            raise TypeError("odd")
        if -1 in prompt:
            raise ValueError("prompt: found token id -1, expected 0 to 257")
        self.added.append(sampling)
        self._open[len(self.added)] = [0, sampling.max_tokens]
        return len(self.added)

    def abort(self, request_id):
        self.aborted.append((request_id, self.steps))
        self._open[request_id][1] = -1

    def step(self):
        self.steps += 1
        self.gate.wait()
        time.sleep(self.pause)
        if self.fault is not None:
            raise self.fault
        outputs = []
        for request_id, (done, limit) in list(self._open.items())[: self.config.slots]:
            if limit < 0:
                outputs.append(RequestOutput(request_id, [], FinishReason.ABORT, RequestStatistics()))
                del self._open[request_id]
                continue
            tokens = [self._letters[place % 26] for place in range(done, min(done + 2, limit))]
            rounds = (RoundCounts(len(tokens), len(tokens) - 1, 1),)
            self._open[request_id][0] += len(tokens)
            ended = self._open[request_id][0] == limit
            reason, statistics = (FinishReason.LENGTH, RequestStatistics()) if ended else (None, None)
            outputs.append(RequestOutput(request_id, tokens, reason, statistics, rounds))
            if ended:
                del self._open[request_id]
        return outputs


@contextlib.asynccontextmanager
async def serving(engine, tracing=None, **settings):
    """Yields a server, a channel to it, and the task whose result is its exit code."""
    config = ServerConfig("scripted", port=0, **settings)
    server = Server(config, engine.config.slots, lambda: engine, lambda line: None, tracing)
    assert await server.start()
    task = asyncio.create_task(server.serve())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel, task
    finally:
        engine.gate.set()
        server.stop()
        server.stop()
        await task
        assert await server.close()
