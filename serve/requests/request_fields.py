"""Which fields of a GenerateRequest the server acts on, and what they become. All others are refused by name."""

from typing import Any

from google.protobuf.message import Message
from grpc import StatusCode

from jaxspec.config import Grammar, SamplingParams
from jaxspec.serve.runtime.refusal import Refusal, invalid
from jaxspec.serve.runtime.unknown_fields import check_known
from jaxspec.v1.generation_pb2 import GenerateRequest

# Fields that become a field of SamplingParams.
SAMPLING_FIELDS = {
    "sampling.temperature": "temperature",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
    "sampling.min_p": "min_p",
    "sampling.seed": "seed",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.presence_penalty": "presence_penalty",
    "sampling.frequency_penalty": "frequency_penalty",
    "sampling.logit_bias": "logit_bias",
    "stopping.max_tokens": "max_tokens",
    "stopping.min_tokens": "min_tokens",
    "stopping.stop_token_ids": "stop_token_ids",
    "stopping.ignore_eos": "ignore_eos",
    "output.logprobs": "log_probs",
    "output.prompt_logprobs": "prompt_log_probs",
    "speculation.budget": "budget",
}
# Fields that the server itself acts on.
SERVER_FIELDS = (
    "request_id",
    "model",
    "text",
    "token_ids",
    "conversation",
    "sampling.choices",
    "stopping.stop",
    "stopping.include_stop",
    "output.text",
    "output.token_ids",
    "output.skip_special_tokens",
    "structured_output.json_schema",
    "structured_output.regex",
    "structured_output.grammar",
    "structured_output.json_object",
    "priority",
    "speculation.enabled",
)
SUPPORTED_FIELDS = (*SERVER_FIELDS, *SAMPLING_FIELDS)

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_PARTS = 16384  # of a repeated field that holds messages


def check_fields(request: GenerateRequest) -> None:
    """Raises Refusal, naming the field, where one is set that the server does not act on."""
    _check_fields(request, "", whole=False)


def sampling_values(request: GenerateRequest) -> dict[str, Any]:
    """Returns the arguments of SamplingParams that the request sets."""
    values: dict[str, Any] = {}
    for path, name in SAMPLING_FIELDS.items():
        block_name, field = path.split(".")
        block = getattr(request, block_name)
        descriptor = block.DESCRIPTOR.fields_by_name[field]
        if descriptor.is_repeated:
            if value := getattr(block, field):
                values[name] = tuple(value.items() if descriptor.message_type is not None else value)
        elif block.HasField(field):
            values[name] = getattr(block, field)
    if request.speculation.HasField("enabled") and not request.speculation.enabled:
        if values.get("budget"):
            raise invalid("speculation.budget", values["budget"], "0 or nothing where speculation is not enabled")
        values["budget"] = 0
    return values


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Makes the engine's settings; raises Refusal, naming the request's field, value and limit."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise refused_by_engine(error) from error


def refused_by_engine(error: ValueError, prompt_field: str = "prompt") -> Refusal:
    """Turns an error of the engine into INVALID_ARGUMENT, with the field named as in the request.

    Args:
      prompt_field: the field that the prompt came in.
    """
    name, colon, rest = str(error).partition(": ")
    name = name.removeprefix("SamplingParams.")
    paths = {name: path for path, name in SAMPLING_FIELDS.items()}
    paths |= {"prompt": prompt_field, "grammar": "structured_output"}
    field = paths.get(name, name)
    return Refusal(StatusCode.INVALID_ARGUMENT, f"{field}{colon}{rest}", field=field if colon else "")


def stop_strings(request: GenerateRequest) -> list[str]:
    """Returns the request's stop strings; raises Refusal for too many, empty or overlong ones."""
    stops = list(request.stopping.stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stopping.stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid("stopping.stop", f"{len(stop)} characters", f"1 to {MAX_STOP_CHARACTERS} in each")
    return stops


def grammar(request: GenerateRequest) -> Grammar | None:
    """Returns what the request's answer must look like, if it says so; raises Refusal where that is too long."""
    rule = request.structured_output.WhichOneof("rule")
    if rule is None or (rule == "json_object" and not request.structured_output.json_object):
        return None
    if rule == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    source = getattr(request.structured_output, rule)
    if not 1 <= len(source) <= MAX_GRAMMAR_CHARACTERS:
        raise invalid(f"structured_output.{rule}", f"{len(source)} characters", f"1 to {MAX_GRAMMAR_CHARACTERS}")
    return Grammar("lark" if rule == "grammar" else rule, source)


def _check_fields(message: Message, prefix: str, whole: bool) -> None:
    """Checks a message and what is inside it.

    Args:
      prefix: path of the message in the request, with a dot at its end.
      whole: whether all its fields are supported, so that only unknown ones are looked for.
    """
    check_known(message, prefix.removesuffix(".") or "request")
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        supported = whole or path in SUPPORTED_FIELDS
        inside = descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry
        if not supported and not (inside and any(name.startswith(f"{path}.") for name in SUPPORTED_FIELDS)):
            raise Refusal(
                StatusCode.UNIMPLEMENTED,
                f"{path}: not supported by this server; leave it unset (GetModelInfo lists what is supported)",
                field=path,
            )
        if inside:
            parts = value if descriptor.is_repeated else [value]
            if len(parts) > MAX_PARTS:
                raise invalid(path, len(parts), f"at most {MAX_PARTS}")
            for part in parts:
                _check_fields(part, f"{path}.", supported)
