"""Requests and answers of `vllm.grpc.engine` in terms of `jaxspec.v1`: names only, no behaviour."""

from collections.abc import Sequence
from typing import Any

from grpc import StatusCode
from smg_grpc_proto import vllm_engine_pb2

from jaxspec.engine.request import RequestStatistics
from jaxspec.engine.token_log_probs import TokenLogProb
from jaxspec.serve.requests.streams import Ending, Piece
from jaxspec.serve.runtime.refusal import Refusal, invalid
from jaxspec.v1.generation_pb2 import GenerateRequest

# Their sampling parameter → our field. A scalar that is zero there is unset, but for those marked `optional`.
FIELDS = {
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "logit_bias": "sampling.logit_bias",
    "n": "sampling.choices",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop_str_in_output": "stopping.include_stop",
    "skip_special_tokens": "output.skip_special_tokens",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "json_schema": "structured_output.json_schema",
    "regex": "structured_output.regex",
    "grammar": "structured_output.grammar",
    "json_object": "structured_output.json_object",
}
# They say how text is written, and where a grammar starts behind a reasoning parser: here goes no text, and a grammar
# starts with the answer.
WITHOUT_EFFECT = ("spaces_between_special_tokens", "grammar_from_first_token")
NEUTRAL = {"repetition_penalty": 1.0}
ALL_TOKENS = 2**32 - 1  # top_k = -1


def to_request(theirs: vllm_engine_pb2.GenerateRequest) -> GenerateRequest:
    """Translates a request into one for our own service, which answers with token ids.

    Raises:
      Refusal: naming a field that has no counterpart, or a value out of its range.
    """
    ours = GenerateRequest(request_id=theirs.request_id)
    ours.output.text = False
    ours.output.skip_special_tokens = False
    for descriptor, value in theirs.ListFields():
        if descriptor.name == "tokenized":
            _set(ours, "token_ids.ids", descriptor.name, value.input_ids)
        elif descriptor.name == "text":
            ours.text = value
        elif descriptor.name not in ("request_id", "sampling_params", "stream"):
            raise _unsupported(descriptor.name)
    for descriptor, value in theirs.sampling_params.ListFields():
        name = descriptor.name
        if name in WITHOUT_EFFECT or NEUTRAL.get(name) == value:
            continue
        if name not in FIELDS:
            raise _unsupported(f"sampling_params.{name}")
        if name == "top_k" and value == ALL_TOKENS:
            value = 0
        elif name == "seed":
            value %= 2**32  # theirs is signed
        _set(ours, FIELDS[name], f"sampling_params.{name}", value)
    return ours


def chunk(piece: Piece, prompt: Sequence[int], completion_tokens: int) -> Any:
    """Tells the new tokens of one choice."""
    return vllm_engine_pb2.GenerateResponse(
        chunk=vllm_engine_pb2.GenerateStreamChunk(
            token_ids=piece.tokens,
            prompt_tokens=len(prompt),
            completion_tokens=completion_tokens,
            index=piece.choice,
            output_logprobs=_output_log_probs(piece.log_probs),
            input_logprobs=_input_log_probs(prompt, piece.prompt_log_probs),
        )
    )


def complete(whole: Piece, ending: Ending, prompt: Sequence[int], statistics: RequestStatistics) -> Any:
    """Tells the end of one choice.

    Args:
      whole: all its pieces joined; without log-probabilities where chunks brought them.
    """
    message = vllm_engine_pb2.GenerateComplete(
        output_logprobs=_output_log_probs(whole.log_probs),
        input_logprobs=_input_log_probs(prompt, whole.prompt_log_probs),
        output_ids=whole.tokens,
        finish_reason=ending.reason,
        prompt_tokens=len(prompt),
        completion_tokens=len(whole.tokens),
        cached_tokens=statistics.cached_tokens,
        index=whole.choice,
        spec_accepted_tokens=statistics.accepted,
        spec_draft_tokens=statistics.drafted,
    )
    if ending.stop_token_id is not None:
        message.matched_token_id = ending.stop_token_id
    elif ending.stop_string is not None:
        message.matched_stop_str = ending.stop_string
    return vllm_engine_pb2.GenerateResponse(complete=message)


def _output_log_probs(entries: Sequence[TokenLogProb]) -> Any:
    if not entries:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[entry.log_prob for entry in entries],
        token_ids=[entry.token for entry in entries],
        top_logprobs=[_top(entry) for entry in entries],
    )


def _input_log_probs(prompt: Sequence[int], entries: Sequence[TokenLogProb]) -> Any:
    if not entries:
        return None
    # Nothing comes before the first token, so its entry is there and empty.
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[
            vllm_engine_pb2.InputTokenLogProb(),
            *(vllm_engine_pb2.InputTokenLogProb(value=entry.log_prob) for entry in entries),
        ],
        token_ids=prompt,
        top_logprobs=[vllm_engine_pb2.TopLogProbs(), *(_top(entry) for entry in entries)],
    )


def _top(entry: TokenLogProb) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[log_prob for _, log_prob in entry.top], token_ids=[token for token, _ in entry.top]
    )


def _set(ours: GenerateRequest, path: str, their_name: str, value: Any) -> None:
    *blocks, field = path.split(".")
    message: Any = ours
    for block in blocks:
        message = getattr(message, block)
        message.SetInParent()
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    try:
        if not descriptor.is_repeated:
            setattr(message, field, value)
        elif descriptor.message_type is not None:
            getattr(message, field).update(value)
        else:
            getattr(message, field).extend(value)
    except ValueError as error:
        raise invalid(their_name, str(error), "a number in its range") from error


def _unsupported(name: str) -> Refusal:
    return Refusal(StatusCode.UNIMPLEMENTED, f"{name}: not supported by this server; leave it unset", field=name)
