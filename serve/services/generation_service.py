"""GenerationService: answers streamed or gathered."""

from typing import Any

from jaxspec.serve.requests.answering import Answerer
from jaxspec.serve.services.messages import ending_message, log_probs_message, usage_message
from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1.generation_pb2_grpc import GenerationServiceServicer


class GenerationService(GenerationServiceServicer):
    """Answers requests with one engine."""

    def __init__(self, answerer: Answerer):
        self._answerer = answerer

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Answers once, with everything."""
        async with self._answerer.answering(request, context) as answering:
            choices = [pb.Choice(index=choice.index) for choice in answering.stream.choices]
            prompt_logprobs: list[pb.TokenLogProbs] = []
            async for piece in self._answerer.pieces(answering):
                choice = choices[piece.choice]
                if answering.text:
                    choice.text += piece.text
                if answering.token_ids:
                    choice.token_ids.extend(piece.tokens)
                choice.logprobs.extend(map(log_probs_message, piece.log_probs))
                prompt_logprobs += map(log_probs_message, piece.prompt_log_probs)
                if piece.ending is not None:
                    statistics = answering.stream.choices[piece.choice].statistics
                    choice.ending.CopyFrom(ending_message(piece.ending, statistics))
            return pb.GenerateResponse(
                request_id=answering.stream.id,
                model=answering.model,
                choices=choices,
                usage=usage_message(answering),
                prompt_logprobs=prompt_logprobs,
            )

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> None:
        """Answers piece by piece, as tokens come."""

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
                delta.logprobs.extend(map(log_probs_message, piece.log_probs))
                delta.prompt_logprobs.extend(map(log_probs_message, piece.prompt_log_probs))
                if piece.tokens or delta.text:
                    await write(delta=delta)
                if piece.ending is not None:
                    running -= 1
                    ending = ending_message(piece.ending, answering.stream.choices[piece.choice].statistics)
                    usage = None if running else usage_message(answering)
                    await write(finished=pb.Finished(choice=piece.choice, ending=ending, usage=usage))
