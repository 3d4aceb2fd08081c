"""Prompts as calls bring them (text, token ids or a conversation) to token ids, off the event loop."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from grpc import StatusCode

from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.serve.runtime.refusal import Refusal, invalid
from jaxspec.v1.generation_pb2 import Conversation, GenerateRequest
from jaxspec.v1.model_pb2 import TokenizeRequest

LARGEST_TEXT = 4 << 20  # bytes
THREADS = 2

Result = TypeVar("Result")


class PromptReader:
    """Turns prompts into token ids.

    Args:
      tokenizer: of the target.
      max_context: the longest prompt is one token shorter.
    """

    def __init__(self, tokenizer: Tokenizer, max_context: int):
        self._tokenizer, self._max_tokens = tokenizer, max_context - 1
        # Longer text can't fit, however it is cut into tokens; refused before any work is done.
        longest = max(len(tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size))
        self._max_bytes = min(LARGEST_TEXT, self._max_tokens * longest)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")

    async def read(self, message: GenerateRequest | TokenizeRequest) -> tuple[str, Sequence[int]]:
        """Returns the field that the prompt came in, and its token ids.

        Raises:
          Refusal: there is none, or it is too long, or it can't be read.
        """
        field = message.WhichOneof(message.DESCRIPTOR.oneofs[0].name)
        if field == "token_ids":
            ids = message.token_ids.ids
            if len(ids) > self._max_tokens:
                raise invalid("token_ids", f"{len(ids)} tokens", f"at most {self._max_tokens} (context limit)")
            return field, list(ids)
        if field == "text":
            self._check_size(field, len(message.text.encode()))
            return field, await self._encode(field, lambda: self._tokenizer.encode(message.text))
        if field == "conversation":
            self._check_size(field, message.conversation.ByteSize())
            return field, await self._encode(field, lambda: self._encode_chat(message.conversation))
        names = ", ".join(choice.name for choice in message.DESCRIPTOR.oneofs[0].fields)
        raise invalid("prompt", "none", f"one of {names}")

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Runs other work on text where it holds up no stream."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _check_size(self, field: str, size: int) -> None:
        if size > self._max_bytes:
            raise invalid(field, f"{size} bytes", f"at most {self._max_bytes} (context of {self._max_tokens} tokens)")

    async def _encode(self, field: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return await self.in_thread(encode)
        except (ValueError, RecursionError) as error:
            raise Refusal(StatusCode.INVALID_ARGUMENT, f"{field}: {error}", field=field) from error

    def _encode_chat(self, conversation: Conversation) -> list[int]:
        messages = []
        for index, message in enumerate(conversation.messages):
            where = f"conversation.messages[{index}].fields_json"
            messages.append(
                {"role": message.role, "content": message.content} | _json_object(where, message.fields_json)
            )
        variables = _json_object("conversation.variables_json", conversation.variables_json)
        if taken := {"messages", "self"} & variables.keys():
            raise invalid("conversation.variables_json", f"the name {min(taken)}", "another")
        return self._tokenizer.encode_chat(messages, **variables)


def _json_object(where: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(where, f"no JSON ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise invalid(where, type(value).__name__, "a JSON object")
    return value
