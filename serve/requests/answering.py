"""From a request to its pieces: checked, admitted, measured, logged and closed, for every service that answers."""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from grpc import StatusCode

from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import RequestStatistics
from jaxspec.serve.requests.open_requests import OpenRequests
from jaxspec.serve.requests.request_fields import (
    check_fields,
    grammar,
    refused_by_engine,
    sampling_params,
    sampling_values,
    stop_strings,
)
from jaxspec.serve.requests.served_model import ServedModel
from jaxspec.serve.requests.streams import ChoiceStream, Piece, RequestStream
from jaxspec.serve.requests.text_stream import TextStream
from jaxspec.serve.runtime.metrics import AnswerClock, Metrics
from jaxspec.serve.runtime.refusal import Refusal, invalid
from jaxspec.serve.runtime.tracing import Tracing
from jaxspec.v1 import generation_pb2 as pb

log = logging.getLogger("jaxspec.requests")

REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
MAX_CHOICES = 64
RETRY_SECONDS = 5.0


@dataclass
class Answering:
    """One request that is being answered.

    Attributes:
      stream: brings its pieces.
      model: the name that clients know the model by.
      prompt: its token ids.
      text, token_ids: whether the client wants them.
      clocks: one for each choice.
      completion_tokens: how many its choices have brought, together.
    """

    stream: RequestStream
    model: str
    prompt: Sequence[int]
    text: bool
    token_ids: bool
    clocks: list[AnswerClock]
    completion_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt)


class Answerer:
    """Answers requests with one engine.

    Args:
      model: gives what is served; called only once the server is ready.
      requests: those that are open.
      metrics: counts what is answered.
      tracing: gets what is logged of each answer.
      max_request_seconds: a request may take no longer, queueing included.
      stalled_seconds: a client that takes nothing for so long is dropped.
    """

    def __init__(
        self,
        model: Callable[[], ServedModel],
        requests: OpenRequests,
        metrics: Metrics,
        tracing: Tracing,
        max_request_seconds: float,
        stalled_seconds: float,
    ):
        self._model, self._requests, self._metrics, self._tracing = model, requests, metrics, tracing
        self._max_request_seconds, self._stalled_seconds = max_request_seconds, stalled_seconds

    @asynccontextmanager
    async def answering(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Answering]:
        """Admits a request and closes it, whatever happens.

        Raises:
          Refusal: it can't be admitted, or takes too long.
        """
        try:
            async with asyncio.timeout(self._max_request_seconds):
                answering = await self._admit(request, context)
                try:
                    yield answering
                finally:
                    self._requests.close(answering.stream)
                    for clock in answering.clocks:
                        clock.closed("error" if answering.stream.failed else FinishReason.ABORT)
                    self._log(answering, context)
        except TimeoutError:
            raise Refusal(
                StatusCode.DEADLINE_EXCEEDED,
                f"request: took longer than {self._max_request_seconds:g} s, this server's limit",
            ) from None

    async def _admit(self, request: pb.GenerateRequest, context: Any) -> Answering:
        request_id = request.request_id or secrets.token_hex(8)
        if not REQUEST_ID.fullmatch(request_id):
            raise invalid(
                "request_id", repr(request_id[:130]), "1 to 128 characters: letters, digits and any of _.:/+=@-"
            )
        self._requests.check(request_id)
        check_fields(request)
        model = self._model()
        if request.model not in ("", model.name):
            raise Refusal(
                StatusCode.NOT_FOUND, f"model: found {request.model!r}, expected {model.name!r}", field="model"
            )
        stops = stop_strings(request)
        wants_text = not request.output.HasField("text") or request.output.text
        wants_ids = not request.output.HasField("token_ids") or request.output.token_ids
        if not (wants_text or wants_ids):
            raise invalid("output", "neither text nor token_ids wanted", "one of them at least")
        limit = min(MAX_CHOICES, self._requests.capacity)
        choices = request.sampling.choices if request.sampling.HasField("choices") else 1
        if not 1 <= choices <= limit:
            raise invalid("sampling.choices", choices, f"1 to {limit}")
        if request.speculation.enabled and not model.depth:
            raise invalid("speculation.enabled", "true", "false or nothing: this server decodes plainly")
        values = await _sampling_values(request, model)
        prompt_field, prompt = await model.prompts.read(request)
        room = model.max_context - len(prompt)
        if values.setdefault("max_tokens", max(room, 1)) > room >= 1:
            raise invalid(
                "stopping.max_tokens",
                values["max_tokens"],
                f"at most {room} (context of {model.max_context} less {len(prompt)} prompt tokens)",
            )
        if context.time_remaining() == 0:
            raise Refusal(StatusCode.DEADLINE_EXCEEDED, "request: its deadline passed before it was queued")

        texts = [_text_stream(request, model, stops) if wants_text or stops else None for _ in range(choices)]
        include_stop = request.stopping.include_stop
        stream = RequestStream(
            request_id, [ChoiceStream(index, text, include_stop, model.depth) for index, text in enumerate(texts)]
        )
        sampling = [sampling_params(values | {"choice": index}) for index in range(choices)]
        # The prompt's log-probabilities are the same for every choice.
        sampling[1:] = [replace(params, prompt_log_probs=None) for params in sampling[1:]]
        self._requests.admit(stream, prompt, sampling, request.priority, prompt_field)
        self._metrics.admitted(len(prompt))
        clocks = [AnswerClock(self._metrics) for _ in range(choices)]
        return Answering(stream, model.name, prompt, wants_text, wants_ids, clocks)

    async def pieces(self, answering: Answering) -> AsyncIterator[Piece]:
        """Yields the stream's pieces and measures their coming."""
        async for piece in answering.stream.pieces():
            answering.completion_tokens += len(piece.tokens)
            clock = answering.clocks[piece.choice]
            if piece.tokens:
                clock.delivered(len(piece.tokens))
            if piece.ending is not None:
                clock.ended(piece.ending.reason)
            yield piece

    async def write(self, context: Any, message: Any) -> None:
        """Sends one message of a stream; raises Refusal where the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._stalled_seconds):
                await context.write(message)
        except TimeoutError:
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                f"stream: the client took nothing for {self._stalled_seconds:g} s, the limit",
            ) from None

    def _log(self, answering: Answering, context: Any) -> None:
        first = answering.clocks[0].seconds_to_first_token
        total = RequestStatistics()
        for choice in answering.stream.choices:
            total.merge(choice.statistics)
        facts = {
            "request_id": answering.stream.id,
            "peer": context.peer(),
            "prompt_tokens": answering.prompt_tokens,
            "completion_tokens": answering.completion_tokens,
            "endings": ",".join(choice.ending.reason for choice in answering.stream.choices if choice.ending),
            "seconds": round(answering.clocks[0].seconds, 4),
            "seconds_to_first_token": first and round(first, 4),
            "tau": round(total.tau, 3),
        }
        log.info("answered", extra=facts)
        self._tracing.annotate(facts)


async def _sampling_values(request: pb.GenerateRequest, model: ServedModel) -> dict[str, Any]:
    """The arguments of SamplingParams that the request and the model's defaults set, once the engine would take them.

    Raises:
      Refusal: naming the field, where it would not.
    """
    values = model.default_sampling | sampling_values(request)
    values.setdefault("seed", secrets.randbits(32))  # One for all choices, whose noise differs by their number.
    values["grammar"] = grammar(request)
    sampling_params({"max_tokens": model.max_context} | values)
    if values["grammar"] is not None:
        try:  # Here, where it holds up no other request.
            await asyncio.to_thread(model.engine.prepare_grammar, values["grammar"])
        except ValueError as error:
            raise refused_by_engine(error) from error
        except TimeoutError as error:
            message = str(error).replace("grammar", "structured_output", 1)
            raise Refusal(StatusCode.RESOURCE_EXHAUSTED, message, retry_after=RETRY_SECONDS) from error
    return values


def _text_stream(request: pb.GenerateRequest, model: ServedModel, stops: Sequence[str]) -> TextStream:
    """Makes the text of one choice."""
    skip_special = not request.output.HasField("skip_special_tokens") or request.output.skip_special_tokens
    return TextStream(
        model.tokenizer.detokenizer(skip_special), stops, request.stopping.include_stop, request.stopping.min_tokens
    )
