"""What comes of a request, as messages of `jaxspec.v1`."""

from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import RequestStatistics
from jaxspec.engine.token_log_probs import TokenLogProb
from jaxspec.serve.requests.answering import Answering
from jaxspec.serve.requests.streams import Ending
from jaxspec.v1 import generation_pb2 as pb

# An answer that its grammar ends becomes an error, not a message.
REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_CANCELLED,
}


def statistics_message(statistics: RequestStatistics) -> pb.SpeculationStatistics:
    """Says what speculation did."""
    accepted, rounds, drafted = statistics.accepted, statistics.rounds, statistics.drafted
    return pb.SpeculationStatistics(
        rounds=rounds,
        draft_tokens=drafted,
        accepted_draft_tokens=accepted,
        acceptance_histogram=statistics.accepted_lengths,
        mean_acceptance_length=1 + accepted / rounds if rounds else 0.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
    )


def log_probs_message(entry: TokenLogProb) -> pb.TokenLogProbs:
    """Says a token's log-probability, and those of the likeliest in its place."""
    top = [pb.TopLogProb(token_id=token, logprob=log_prob) for token, log_prob in entry.top]
    return pb.TokenLogProbs(token_id=entry.token, logprob=entry.log_prob, top=top)


def ending_message(ending: Ending, statistics: RequestStatistics) -> pb.Ending:
    """Says how one choice ended, and what speculation did for it."""
    message = pb.Ending(reason=REASONS[ending.reason], speculation=statistics_message(statistics))
    if ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    elif ending.stop_string is not None:
        message.stop_string = ending.stop_string
    return message


def usage_message(answering: Answering) -> pb.Usage:
    """Says how many tokens a request took."""
    return pb.Usage(
        prompt_tokens=answering.prompt_tokens,
        completion_tokens=answering.completion_tokens,
        cached_tokens=answering.stream.choices[0].statistics.cached_tokens,
    )
