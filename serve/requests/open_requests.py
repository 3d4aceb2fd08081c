"""The requests that are open: admission, a bound on how many wait, abort, and the end of all of them."""

import asyncio
import functools
from collections.abc import Iterable, Sequence

from grpc import StatusCode

from jaxspec.config import SamplingParams
from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import RequestOutput
from jaxspec.serve.requests.request_fields import refused_by_engine
from jaxspec.serve.requests.streams import ChoiceStream, RequestStream
from jaxspec.serve.runtime.engine_thread import EngineThread, Job
from jaxspec.serve.runtime.health import Health
from jaxspec.serve.runtime.metrics import Metrics
from jaxspec.serve.runtime.refusal import Refusal

RETRY_SECONDS = 1.0


class OpenRequests:
    """Keeps requests by id, from admission to the end of their calls.

    Args:
      engine: answers them.
      health: tells whether new ones are welcome.
      metrics: counts the rounds.
      capacity: choices that may be open at once, in slots or waiting.
    """

    def __init__(self, engine: EngineThread, health: Health, metrics: Metrics, capacity: int):
        self._engine, self._health, self._metrics, self.capacity = engine, health, metrics, capacity
        self._requests: dict[str, tuple[RequestStream, list[Job]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def check(self, request_id: str) -> None:
        """Raises Refusal where the server takes no requests, or none of this id."""
        if refusal := self._health.refusal:
            raise refusal
        if request_id in self._requests:
            raise Refusal(
                StatusCode.ALREADY_EXISTS,
                f"request_id: found {request_id}, which is open already; use another",
                field="request_id",
            )

    def admit(
        self,
        stream: RequestStream,
        prompt: Sequence[int],
        sampling: Sequence[SamplingParams],
        priority: int,
        prompt_field: str,
    ) -> None:
        """Queues every choice of a request; each admitted request must be closed.

        Args:
          sampling: of each choice.
          priority: higher is sooner.
          prompt_field: the request's, for messages.

        Raises:
          Refusal: as `check`, or too many requests are open.
        """
        self.check(stream.id)
        unfinished = sum(choice.ending is None for open_, _ in self._requests.values() for choice in open_.choices)
        if unfinished + len(stream.choices) > self.capacity:
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                f"queue: found {unfinished} answers open and {len(stream.choices)} more wanted, expected at most "
                f"{self.capacity}; try again later",
                retry_after=RETRY_SECONDS,
            )

        def refused(error: Exception) -> None:
            stream.fail(
                refused_by_engine(error, prompt_field)
                if isinstance(error, ValueError)
                else Refusal(StatusCode.INTERNAL, f"engine: refused the request with {type(error).__name__}")
            )

        jobs = []
        for choice, params in zip(stream.choices, sampling, strict=True):
            job = Job(prompt, params, priority, lambda output: None, refused)
            job.deliver = functools.partial(self._deliver, stream, choice, job)
            jobs.append(job)
        self._requests[stream.id] = stream, jobs
        self._idle.clear()
        for job in jobs:
            self._engine.submit(job)

    def close(self, stream: RequestStream) -> None:
        """Forgets a request whose call is over; what still runs of it is aborted."""
        _, jobs = self._requests.pop(stream.id)
        self._abort(stream, jobs)
        for choice in stream.choices:
            choice.take()  # gRPC may keep a call's frames, and this with them, for as long as its client likes
        if not self._requests:
            self._idle.set()

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests with what they have; returns the ids of those that were open."""
        found = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._requests]
        for request_id in found:
            self._abort(*self._requests[request_id])
        return found

    @property
    def ids(self) -> list[str]:
        """The ids of the open requests."""
        return list(self._requests)

    def fail_all(self, refusal: Refusal) -> None:
        """Ends every request with a status."""
        for stream, jobs in self._requests.values():
            stream.fail(refusal)
            for job in jobs:
                self._engine.abort(job)

    async def drained(self, timeout: float) -> bool:
        """Waits until no request is open; False if some still are after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def _abort(self, stream: RequestStream, jobs: Sequence[Job]) -> None:
        for choice, job in zip(stream.choices, jobs, strict=True):
            if choice.ending is None:
                self._engine.abort(job)
        stream.end(FinishReason.ABORT)

    def _deliver(self, stream: RequestStream, choice: ChoiceStream, job: Job, output: RequestOutput) -> None:
        self._metrics.rounds(output.rounds)
        if output.queued_seconds is not None:
            self._metrics.queue_time.observe(output.queued_seconds)
        if output.finish_reason is FinishReason.GRAMMAR:
            stream.fail(
                Refusal(
                    StatusCode.FAILED_PRECONDITION,
                    "structured_output: found an answer that can neither go on nor end here, since the grammar and "
                    "what else the request asks for leave no token; expected rules that leave one",
                    field="structured_output",
                )
            )
            return
        stream.push(choice, output)
        if choice.ending is not None and output.finish_reason is None:
            self._engine.abort(job)  # a stop string that only the text shows
