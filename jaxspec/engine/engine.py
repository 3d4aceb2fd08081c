"""The engine: requests in, tokens out, many at once, driven by compiled programs that are dispatched ahead."""

import collections
import functools
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxspec.config import EngineConfig, Grammar, SamplingParams, SpeculationConfig
from jaxspec.engine.admission import Admission
from jaxspec.engine.grammar import GrammarCompiler
from jaxspec.engine.loading import load_models
from jaxspec.engine.memory import cache_bytes_per_token, max_context, page_count
from jaxspec.engine.model_runner import CacheSize, ModelRunner, PendingCall, RoundTokens
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import Completion, EngineLoad, Request, RequestOutput
from jaxspec.engine.scheduler import Scheduler
from jaxspec.model.families.config import check_drafter
from jaxspec.model.families.dflash import DFlashDrafter
from jaxspec.model.families.protocols import Drafter, Target
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.speculation.drafting import MakeDrafting, dflash_drafting


class Engine:
    """Decodes requests on one mesh, with a drafter or without.

    Args:
      target: module filled with arrays on `mesh`.
      drafter: module, or None to decode plainly.
      mesh: one axis, `tensor`.
      speculation: how rounds draft; may be changed while no request is open.
      config: sizes.
      tokenizer: kept for callers; the engine itself deals in token ids.
      eos_token_ids: end an answer unless the request ignores them; by default the target's own.
      make_drafting: builds the drafting functions from the drafter module.
      report: gets a line at each stage of start-up and for each program compiled.

    Raises:
      ValueError: naming the field, where drafter, target and settings do not fit together, or the cache does not fit
        into memory.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        mesh: jax.sharding.Mesh,
        speculation: SpeculationConfig | None = None,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
        make_drafting: MakeDrafting = dflash_drafting,
        report: Callable[[str], None] = lambda line: None,
    ):
        self.config = config or EngineConfig()
        self.target, self.drafter, self.mesh, self.tokenizer = target, drafter, mesh, tokenizer
        if isinstance(drafter, DFlashDrafter):
            check_drafter(target.config, drafter.config)
        self.eos_token_ids = tuple(target.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        vocab = target.config.vocab_size
        if wrong := [index for index in self.eos_token_ids if not 0 <= index < vocab]:
            raise ValueError(
                f"eos_token_ids: found {wrong[0]}, expected 0 to {vocab - 1}; see the target's eos_token_id"
            )
        self.max_context = max_context(self.config, target, drafter)
        self.page_count = page_count(self.config, self.max_context, target, drafter, mesh)
        self._admission = Admission(
            vocab, self.max_context, self.page_count * self.config.page_size, self.eos_token_ids
        )
        programs = Programs(mesh, target, drafter, make_drafting, report)
        self.runner = ModelRunner(
            programs, self.config, CacheSize(self.page_count, self.config.page_size, self.max_context)
        )
        self._scheduler = Scheduler(self.config, self.page_count)
        self._in_flight: collections.deque[PendingCall] = collections.deque()
        self._next_id = 0
        self.speculation = speculation or SpeculationConfig()

    @classmethod
    def from_checkpoints(
        cls,
        target: Path | str,
        drafter: Path | str | None = None,
        *,
        speculation: SpeculationConfig | None = None,
        config: EngineConfig | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> "Engine":
        """Loads converted checkpoints and builds an engine over them.

        Raises:
          ValueError: in one line, for a folder that is not a finished converted checkpoint, or models and settings
            that do not fit together.
        """
        config = config or EngineConfig()
        loaded = load_models(target, drafter, config, report)
        return cls(
            loaded.target,
            loaded.drafter,
            mesh=loaded.mesh,
            speculation=speculation,
            config=config,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.tokenizer.eos_token_ids or None,
            report=report,
        )

    @property
    def speculation(self) -> SpeculationConfig:
        """How rounds draft."""
        return self._speculation

    @speculation.setter
    def speculation(self, value: SpeculationConfig) -> None:
        if self.has_work:
            raise ValueError(
                f"speculation: {len(self._scheduler.open)} request(s) open, expected none when it is changed"
            )
        if self.drafter is None:
            value = SpeculationConfig(budget=0, rounds_per_call=value.rounds_per_call)
        elif value.draft_length is not None and value.draft_length > self.drafter.config.depth:
            raise ValueError(
                f"SpeculationConfig.draft_length: found {value.draft_length}, expected 1 to "
                f"{self.drafter.config.depth}, the drafter's block without its anchor"
            )
        if value.budget and value.top_k_cap > self.target.config.vocab_size:
            raise ValueError(
                f"SpeculationConfig.top_k_cap: found {value.top_k_cap}, expected at most the vocabulary's "
                f"{self.target.config.vocab_size}"
            )
        self._speculation = value
        self._scheduler.rounds_per_call, self._scheduler.tokens_per_round = value.rounds_per_call, self.depth + 1

    @property
    def depth(self) -> int:
        """L of the current setting; 0 when decoding plainly."""
        if self.drafter is None or not self.speculation.budget:
            return 0
        return self.speculation.length(self.drafter.config.depth)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._scheduler.open)

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self.runner.programs.leaves[0].dtype)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; may be read from any thread."""
        schedule = self._scheduler
        used = self.page_count - schedule.pages.free
        return EngineLoad(len(schedule.running), len(schedule.waiting), used, self.page_count)

    @property
    def compiling(self) -> str | None:
        """The program that is being compiled right now, which may take minutes; may be read from any thread."""
        return self.runner.programs.compiling

    def describe(self) -> list[tuple[str, str]]:
        """What the engine runs on and with, for a start-up banner."""
        device = self.mesh.devices.flat[0]
        replicated = self.target.layout.replicated()
        page_bytes = cache_bytes_per_token(self.target, self.drafter) * self.config.page_size
        drafting = f"block {self.drafter.config.block_size}" if isinstance(self.drafter, DFlashDrafter) else "none"
        return [
            ("devices", f"{self.mesh.size} × {device.device_kind}"),
            ("replicated axes", ", ".join(replicated) or "none"),
            ("target", f"{self.target.config.family}, {_size(self.runner.programs.leaves)}"),
            ("drafter", drafting),
            ("budget", f"N={self.speculation.budget}, K={self.speculation.top_k_cap}, L={self.depth}"),
            ("slots", str(self.config.slots)),
            ("context", f"{self.max_context} tokens"),
            (
                "cache",
                f"{self.page_count} pages of {self.config.page_size}, {self.page_count * page_bytes / 1e9:.2f} GB"
                + (", each page's rows split over the devices" if self.target.layout.splits("page_rows") else ""),
            ),
        ]

    def warm_up(self) -> None:
        """Compiles and runs the programs that a single short greedy request needs."""
        room = min(self.max_context, self.page_count * self.config.page_size)
        prompt = [0] * min(2, room - 1)
        tokens = min(4 * (self.depth + 1), room - len(prompt))
        self.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    def add(self, prompt: Sequence[int], sampling: SamplingParams | None = None, priority: int = 0) -> int:
        """Queues a request and returns its id.

        Args:
          priority: higher ones get slots first, and are paused last where pages run out.

        Raises:
          ValueError: naming field, value and limit, for a prompt that is empty, too long or holds an id out of range.
        """
        request = self._request(prompt, sampling or SamplingParams(), priority)
        self._scheduler.queue(request)
        return request.id

    def prepare_grammar(self, grammar: Grammar) -> None:
        """Tries a stranger's grammar out and compiles it, before a request with it is added; from any thread.

        Raises:
          ValueError: it is none, or no answer can meet it, or it is too large.
          TimeoutError: others take long to try out; try again later.
        """
        self._grammars.prepare(grammar, tried=True)

    def forget_prefixes(self) -> int:
        """Frees the cache pages that are only kept for requests to come; returns how many."""
        return self._scheduler.pages.forget()

    def abort(self, request_id: int) -> None:
        """Ends a request; its slot and pages are free for the next call. The next `step` reports it."""
        self._scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Dispatches what can run next, reads back the oldest call once enough are in flight; returns what is new."""
        outputs = [_output(request) for request in self._scheduler.take_aborted()]
        self.runner.admit(self._scheduler.assign())
        self._prefill()
        dispatched = len(self._in_flight) < self._scheduler.calls_ahead and self._decode(outputs)
        if self._in_flight and (len(self._in_flight) >= self._scheduler.calls_ahead or not dispatched):
            self._collect(outputs)
        if not outputs:
            self._scheduler.check_progress()
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Runs prompts to their ends and returns the answers in order.

        Raises:
          ValueError: as `add`, before any prompt is queued; or other requests are open, whose outputs would be lost.
        """
        if self.has_work:
            raise ValueError(
                f"generate: found {len(self._scheduler.open)} open request(s), expected none; use add and step"
            )
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(f"sampling: found {len(sampling)}, expected one for each of {len(prompts)} prompts")
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
        for request in requests:
            self._scheduler.queue(request)
        parts: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
        unfinished = set(parts)
        while unfinished:
            for output in self.step():
                if output.request_id in unfinished:
                    parts[output.request_id].append(output)
                    if output.finish_reason is not None:
                        unfinished.remove(output.request_id)
        return [Completion.joined(outputs) for outputs in parts.values()]

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        if self.tokenizer is None:
            raise ValueError("grammar: the engine has no tokenizer, expected the target's")
        return GrammarCompiler(self.tokenizer, self.target.config.vocab_size, self.eos_token_ids)

    # Requests

    def _request(self, prompt: Sequence[int], sampling: SamplingParams, priority: int = 0) -> Request:
        """Checks a prompt and its settings and gives them an id."""
        ids, stop_ids, limit = self._admission.check(prompt, sampling)
        if sampling.budget is not None and sampling.budget > self.speculation.budget:
            raise ValueError(
                f"budget: found {sampling.budget}, expected at most the engine's {self.speculation.budget}"
            )
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        request = Request(self._next_id, ids, sampling, limit, seed, stop_ids, priority)
        if sampling.grammar is not None:
            request.matcher = self._grammars.matcher(sampling.grammar)
        self._next_id += 1
        return request

    # Calls

    def _prefill(self) -> None:
        """Processes the next chunk of every prompt that is not done."""
        if parts := self._scheduler.next_prefill():
            self.runner.prefill(parts)
            self.runner.admit(self._scheduler.prefilled(parts))

    def _decode(self, outputs: list[RequestOutput]) -> bool:
        """Dispatches one call for the requests that decode; False where there are none."""
        while (requests := self._scheduler.next_decode()) is None:
            self._make_room(outputs)
        if requests:
            call = self.runner.decode(requests, self.speculation)
            self._scheduler.dispatched(requests, call.rounds)
            self._in_flight.append(call)
        return bool(requests)

    def _make_room(self, outputs: list[RequestOutput]) -> None:
        """Frees pages: reads back every call in flight, then, if none ended a request, pauses the last in turn."""
        free = self._scheduler.pages.free
        while self._in_flight:
            self._collect(outputs)
        if self._scheduler.pages.free == free:
            self._scheduler.pause_last()

    def _collect(self, outputs: list[RequestOutput]) -> None:
        """Reads back the oldest call in flight."""
        call = self._in_flight.popleft()
        for request, rounds, ended in call.read():
            tokens = [token for one in rounds for token in one.tokens]
            if not self._scheduler.read_back(request, call.rounds, tokens, ended):
                continue
            for one in rounds:
                request.statistics.record(one.counts, call.depth)
            if rounds or request.finish_reason is not None:
                outputs.append(_output(request, rounds))


def _output(request: Request, rounds: Sequence[RoundTokens] = ()) -> RequestOutput:
    """What a step brought for a request, the prompt's log-probabilities with its first tokens."""
    queued, request.queued_seconds = request.queued_seconds, None
    return RequestOutput(
        request.id,
        [token for one in rounds for token in one.tokens],
        request.finish_reason,
        request.statistics if request.finish_reason is not None else None,
        tuple(one.counts for one in rounds),
        [entry for one in rounds for entry in one.log_probs],
        request.take_prompt_log_probs() if rounds else [],
        request.statistics.cached_tokens,
        queued,
    )


def _size(leaves: tuple[jax.Array, ...]) -> str:
    return f"{sum(leaf.nbytes for leaf in leaves) / 1e9:.2f} GB of weights, {leaves[0].dtype}"
