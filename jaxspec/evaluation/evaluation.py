"""Acceptance and speed over prompt sets: plain decoding, the DFlash chain and DDTree on the same requests.

A request is one turn of a prompt. Plain decoding comes first and its answers are the history that later turns see, so
every mode is asked the very same requests with the same seeds, and lossless decoding gives the same tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine.decode_clock import DecodeClock
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, RequestOutput
from jaxspec.evaluation.modes import Mode
from jaxspec.evaluation.prompts import Prompt, Request, request_seed
from jaxspec.model.families.protocols import Drafter, Target
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.arithmetic import cdiv

# Long pages keep the widths of page tables, and with them the programs to compile, few.
PAGE_SIZE = 512
PREFILL_CHUNK = 128
TEMPLATE_TOKENS = 32  # What the chat template may add to a turn.


# Called with mode and temperature of each request that has ended.
Progress = Callable[[Mode, float], None]


@dataclass(frozen=True)
class Pass:
    """One mode's answers at one temperature.

    Attributes:
      records: one a request, as `results.jsonl` holds them.
      tokens_per_second: of wall time at a full batch of requests, prompts included, compiling left out; None where
        everything was compiled as it ran.
      left_out: turns that were not asked, one entry a conversation: `temperature`, `set`, `id`, `turn` (the first that
        was not), `turns` (how many) and `reason`. Plain decoding finds them; the other modes' passes hold none.
    """

    mode: Mode
    temperature: float
    records: list[dict[str, Any]]
    tokens_per_second: float | None
    left_out: tuple[dict[str, Any], ...] = ()


class Evaluation:
    """Decodes prompts with one target and one drafter.

    Args:
      target, drafter: modules on `mesh`.
      batch: requests decoded at once; every program runs at this size, so that few are compiled.
      max_tokens: of each answer.
      seed: of all sampling; a request's own seed follows from it and from the request's name.
      report: gets a line for each program compiled.

    Raises:
      ValueError: naming the prompt, where the first turn of one is too long for the models or the chat template
        refuses it; or what does not fit together.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        *,
        mesh: jax.sharding.Mesh,
        batch: int,
        max_tokens: int,
        seed: int,
        report: Callable[[str], None] = lambda line: None,
    ):
        self._tokenizer, self._prompts = tokenizer, list(prompts)
        self._max_tokens, self._seed = max_tokens, seed
        self._limit = min(target.config.max_position_embeddings, drafter.config.max_position_embeddings)
        config = EngineConfig(
            devices=mesh.size,
            slots=batch,
            batch_buckets=(batch,),
            page_size=PAGE_SIZE,
            cache_tokens=self._cache_tokens(batch),
            prefill_chunk=PREFILL_CHUNK,
            keep_prefixes=False,  # Else the modes after the first would find their prompts in the cache.
        )

        def engine(drafter: Drafter | None) -> Engine:
            ends = tokenizer.eos_token_ids or None
            return Engine(target, drafter, mesh=mesh, config=config, eos_token_ids=ends, report=report)

        # Plain decoding is timed without what a drafter costs even when it does not draft.
        self._plain, self._drafting = engine(None), engine(drafter)
        self._depth = drafter.config.depth

    @property
    def depth(self) -> int:
        """The drafter's L, the tokens that it drafts in one pass."""
        return self._depth

    def check(self, modes: Sequence[Mode]) -> None:
        """Raises ValueError, naming the field, for a mode that the models cannot run."""
        for mode in modes:
            self._drafting.speculation = mode.speculation

    def run(self, modes: Sequence[Mode], temperatures: Sequence[float], progress: Progress) -> Iterator[Pass]:
        """Yields each mode's pass at each temperature; plain decoding, which comes first, must be among the modes.

        A conversation that outgrows the context, or whose answers the chat template refuses, ends before that turn.

        Args:
          progress: gets mode and temperature of each request that has ended.
        """
        plain = next(mode for mode in modes if mode.speculation.budget == 0)
        for temperature in temperatures:
            requests, base = self._plain_pass(plain, temperature, progress)
            reference = {_key(record): record["token_ids"] for record in base.records}
            yield base
            for mode in modes:
                if mode is not plain:
                    yield self._decode(mode, temperature, requests, reference, progress)

    def _plain_pass(self, mode: Mode, temperature: float, progress: Progress) -> tuple[list[Request], Pass]:
        """Decodes turn after turn, since a turn's prompt holds the answers to those before it."""
        talks: list[tuple[Prompt, list[dict[str, str]]]] = [(prompt, []) for prompt in self._prompts]
        requests, records, left_out, clock = [], [], [], DecodeClock(self._plain)
        for turn in range(max(len(prompt.turns) for prompt in self._prompts)):
            asked, going = [], []
            for prompt, talk in talks:
                if turn == len(prompt.turns):
                    continue
                talk.append({"role": "user", "content": prompt.turns[turn]})
                try:
                    asked.append(Request(prompt, turn, self._encode(talk)))
                    going.append((prompt, talk))
                except ValueError as error:
                    place = {"temperature": temperature, "set": prompt.set, "id": prompt.id, "turn": turn}
                    left_out.append(place | {"turns": len(prompt.turns) - turn, "reason": str(error)})
            talks = going
            answers = self._run(clock, mode, temperature, asked, progress)
            for request, (_, talk), answer in zip(asked, talks, answers, strict=True):
                record = self._record(request, mode, temperature, answer, answer.tokens)
                talk.append({"role": "assistant", "content": record["text"]})
                records.append(record)
            requests += asked
        return requests, Pass(mode, temperature, records, clock.tokens_per_second, tuple(left_out))

    def _decode(
        self,
        mode: Mode,
        temperature: float,
        requests: list[Request],
        reference: dict[tuple[str, str, int], list[int]],
        progress: Progress,
    ) -> Pass:
        clock = DecodeClock(self._drafting)
        answers = self._run(clock, mode, temperature, requests, progress)
        records = [
            self._record(request, mode, temperature, answer, reference[request.key])
            for request, answer in zip(requests, answers, strict=True)
        ]
        return Pass(mode, temperature, records, clock.tokens_per_second)

    def _run(
        self, clock: DecodeClock, mode: Mode, temperature: float, requests: list[Request], progress: Progress
    ) -> list[Completion]:
        """Answers the requests with the engine that the clock times, and returns the answers in their order."""
        engine = clock.engine
        engine.speculation = mode.speculation
        # Requests of one length run side by side.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].tokens))
        index_of: dict[int, int] = {}
        outputs: dict[int, list[RequestOutput]] = {}
        for index in order:
            seed = request_seed(self._seed, requests[index].key)
            sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=self._max_tokens)
            request_id = engine.add(requests[index].tokens, sampling)
            index_of[request_id], outputs[index] = index, []
        while engine.has_work:
            for output in clock.step():
                outputs[index_of[output.request_id]].append(output)
                if output.finish_reason is not None:
                    progress(mode, temperature)
        return [Completion.joined(outputs[index]) for index in range(len(requests))]

    def _record(
        self, request: Request, mode: Mode, temperature: float, answer: Completion, reference: list[int]
    ) -> dict[str, Any]:
        statistics = answer.statistics
        return {
            "set": request.prompt.set,
            "id": request.prompt.id,
            "category": request.prompt.category,
            "turn": request.turn,
            "mode": mode.name,
            "budget": mode.speculation.budget,
            "top_k_cap": mode.speculation.top_k_cap,
            "temperature": temperature,
            "prompt_tokens": len(request.tokens),
            "tokens": statistics.produced,
            "finish_reason": answer.finish_reason,
            "rounds": statistics.rounds,
            "drafted": statistics.drafted,
            "tau": statistics.tau,
            "accepted_lengths": statistics.accepted_lengths,
            "first_difference": first_difference(answer.tokens, reference),
            "text": self._tokenizer.decode(answer.tokens),
            "token_ids": answer.tokens,
        }

    def _encode(self, talk: list[dict[str, str]]) -> list[int]:
        """Encodes a conversation; ValueError where it leaves no room for an answer, or the template refuses it."""
        tokens = self._tokenizer.encode_chat(talk)
        if len(tokens) >= self._limit:
            raise ValueError(f"found {len(tokens)} tokens, expected at most {self._limit - 1} (context limit)")
        return tokens

    def _cache_tokens(self, batch: int) -> int:
        """Gives a size in which the longest conversations run side by side; refuses a first turn that cannot be asked.

        How long a conversation grows is an estimate: an answer read back as text may take more tokens than were
        generated. Where that matters the cache also holds any one request that the models do, whatever its length.
        """
        longest = 0
        for prompt in self._prompts:
            talk: list[dict[str, str]] = []
            for turn in prompt.turns:
                talk += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
            try:
                self._encode(talk[:1])
                own = len(self._tokenizer.encode_chat(talk[:-1]))
            except ValueError as error:
                raise ValueError(f"prompt {prompt.id} of {prompt.set}: {error}") from None
            longest = max(longest, own + len(prompt.turns) * (self._max_tokens + TEMPLATE_TOKENS))
        whole = self._limit if any(len(prompt.turns) > 1 for prompt in self._prompts) else 0
        return max(batch * _in_pages(min(longest, self._limit)), _in_pages(whole))


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first index at which two answers differ, an end before the other's included; None where they are equal."""
    for index, (one, other) in enumerate(zip(tokens, reference, strict=False)):
        if one != other:
            return index
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def _key(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["set"], record["id"], record["turn"]


def _in_pages(tokens: int) -> int:
    return cdiv(tokens, PAGE_SIZE) * PAGE_SIZE
