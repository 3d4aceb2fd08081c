"""GenerationService: answers streamed or gathered."""

from typing import Any

from jaxspec.engine.request import RequestStatistics
from jaxspec.engine.token_log_probs import TokenLogProb
from jaxspec.serve.requests.answering import Answerer, Answering
from jaxspec.serve.requests.streams import Ending
from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1.generation_pb2_grpc import GenerationServiceServicer

REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_CANCELLED,
}


class GenerationService(GenerationServiceServicer):
    """The service over one engine."""

    def __init__(self, answerer: Answerer):
        self._answerer = answerer

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Answers once."""
        async with self._answerer.answering(request, context) as answering:
            choices = [pb.Choice(index=choice.index) for choice in answering.stream.choices]
            prompt_logprobs: list[pb.TokenLogProbs] = []
            async for piece in self._answerer.pieces(answering):
                choice = choices[piece.choice]
                if answering.text:
                    choice.text += piece.text
                if answering.token_ids:
                    choice.token_ids.extend(piece.tokens)
                choice.logprobs.extend(map(_log_probs, piece.log_probs))
                prompt_logprobs += map(_log_probs, piece.prompt_log_probs)
                if piece.ending is not None:
                    choice.ending.CopyFrom(_ending(piece.ending, answering.stream.choices[piece.choice].statistics))
            return pb.GenerateResponse(
                request_id=answering.stream.id,
                model=answering.model,
                choices=choices,
                usage=_usage(answering),
                prompt_logprobs=prompt_logprobs,
            )

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> None:
        """Answers as it comes."""

        async def write(**event: Any) -> None:
            await self._answerer.write(context, pb.GenerateStreamResponse(**event))

        async with self._answerer.answering(request.request, context) as answering:
            # On its own: gRPC can't tell a client that takes nothing how its call ended before this is out.
            await context.send_initial_metadata((("x-request-id", answering.stream.id),))
            await write(
                accepted=pb.Accepted(
                    request_id=answering.stream.id,
                    model=answering.model,
                    prompt_tokens=answering.prompt_tokens,
                )
            )
            running = len(answering.stream.choices)
            async for piece in self._answerer.pieces(answering):
                delta = pb.Delta(choice=piece.choice, from_draft=piece.from_draft)
                if answering.text:
                    delta.text = piece.text
                if answering.token_ids:
                    delta.token_ids.extend(piece.tokens)
                delta.logprobs.extend(map(_log_probs, piece.log_probs))
                delta.prompt_logprobs.extend(map(_log_probs, piece.prompt_log_probs))
                if piece.tokens or delta.text:
                    await write(delta=delta)
                if piece.ending is not None:
                    running -= 1
                    ending = _ending(piece.ending, answering.stream.choices[piece.choice].statistics)
                    usage = None if running else _usage(answering)
                    await write(finished=pb.Finished(choice=piece.choice, ending=ending, usage=usage))


def statistics_message(statistics: RequestStatistics) -> pb.SpeculationStatistics:
    """The API's form of what speculation did."""
    accepted, rounds, drafted = statistics.accepted, statistics.rounds, statistics.drafted
    return pb.SpeculationStatistics(
        rounds=rounds,
        draft_tokens=drafted,
        accepted_draft_tokens=accepted,
        acceptance_histogram=statistics.accepted_lengths,
        mean_acceptance_length=1 + accepted / rounds if rounds else 0.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
    )


def _log_probs(entry: TokenLogProb) -> pb.TokenLogProbs:
    top = [pb.TopLogProb(token_id=token, logprob=log_prob) for token, log_prob in entry.top]
    return pb.TokenLogProbs(token_id=entry.token, logprob=entry.log_prob, top=top)


def _ending(ending: Ending, statistics: RequestStatistics) -> pb.Ending:
    message = pb.Ending(reason=REASONS[ending.reason], speculation=statistics_message(statistics))
    if ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    elif ending.stop_string is not None:
        message.stop_string = ending.stop_string
    return message


def _usage(answering: Answering) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=answering.prompt_tokens,
        completion_tokens=answering.completion_tokens,
        cached_tokens=answering.stream.choices[0].statistics.cached_tokens,
    )
