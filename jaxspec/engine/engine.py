"""The engine: requests in, tokens out, many at once, driven by compiled programs that are dispatched ahead."""

import collections
import functools
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import MAX_BUDGET, MAX_STOP_IDS, EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.admission import Admission
from jaxspec.engine.grammar import Grammar, GrammarCompiler
from jaxspec.engine.memory import available_bytes, cache_bytes_per_token, max_context, page_count, wanted_context
from jaxspec.engine.memory_plan import placement_of, plan_models
from jaxspec.engine.programs import DecodeShape, PrefillShape, Programs, bucket, replicate
from jaxspec.engine.request import Completion, EngineLoad, Request, RequestOutput, RoundCounts
from jaxspec.engine.scheduler import Schedule
from jaxspec.model.families.config import check_drafter
from jaxspec.model.families.dflash import DFlashDrafter
from jaxspec.model.layers.cache import empty_cache
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.mesh import make_mesh
from jaxspec.speculation.drafting import MakeDrafting, dflash_drafting
from jaxspec.speculation.log_probs import TokenLogProb, host_log_probs
from jaxspec.speculation.logits_processors import adjustments_of, no_adjustments
from jaxspec.speculation.round import Caches, RoundResult
from jaxspec.speculation.sampling import work_of
from jaxspec.speculation.state import empty_rows

CALLS_IN_FLIGHT = 2
SMALLEST_PREFILL_BUCKET = 32  # tokens
PREFILL_TOKENS = 8192  # of all requests in one prefill call


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
        target: Any,
        drafter: Any = None,
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
        self._programs = Programs(mesh, target, drafter, make_drafting, report)
        self._schedule = Schedule(self.config, self.page_count, self.max_context)
        self._in_flight: collections.deque[tuple[RoundResult, list[Request]]] = collections.deque()
        self._next_id = 0
        self.speculation = speculation or SpeculationConfig()
        self._caches = self._empty_caches()
        self._state = replicate(empty_rows(self.config.slots, MAX_STOP_IDS), mesh)
        self._adjustments = self._programs.place(no_adjustments(self.config.slots, vocab))
        self._adjusted_slots: set[int] = set()  # slots whose row of adjustments may change logits

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
        from jaxspec.model.checkpoint.description import describe_checkpoint
        from jaxspec.model.checkpoint.loading import load_drafter, load_target, open_checkpoint

        config = config or EngineConfig()
        mesh = make_mesh(config.devices)
        plan = plan_models(
            describe_checkpoint(open_checkpoint(target), "target"),
            None if drafter is None else describe_checkpoint(open_checkpoint(drafter), "drafter"),
            config,
        )
        context = wanted_context(config, plan.max_context)
        free = available_bytes(mesh)
        tokens = config.cache_tokens or context
        if free is not None and (refusal := plan.shortfall(int(config.memory_fraction * free), tokens)):
            raise ValueError(refusal)
        report(f"loading target {target}")
        target_module = load_target(Path(target), mesh, placement=placement_of(config))
        tokenizer = Tokenizer.from_checkpoint(Path(target))
        drafter_module = None
        if drafter is not None:
            report(f"loading drafter {drafter}")
            drafter_module = load_drafter(Path(drafter), mesh, target_module.config)
            # Most drafters bring no tokenizer: they speak in the target's ids.
            if (Path(drafter) / "tokenizer" / "tokenizer.json").is_file():
                check_tokenizers(tokenizer, Tokenizer.from_checkpoint(Path(drafter)))
        return cls(
            target_module,
            drafter_module,
            mesh=mesh,
            speculation=speculation,
            config=config,
            tokenizer=tokenizer,
            eos_token_ids=tokenizer.eos_token_ids or None,
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
                f"speculation: {len(self._schedule.open)} request(s) open, expected none when it is changed"
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
        self._schedule.rounds_per_call, self._schedule.tokens_per_round = value.rounds_per_call, self.depth + 1

    @property
    def depth(self) -> int:
        """L of the current setting; 0 when decoding plainly."""
        if not self.speculation.budget:
            return 0
        return self.speculation.draft_length or self.drafter.config.depth

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._schedule.open)

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self._programs.leaves[0].dtype)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; may be read from any thread."""
        schedule = self._schedule
        used = self.page_count - schedule.pages.free
        return EngineLoad(len(schedule.running), len(schedule.waiting), used, self.page_count)

    @property
    def compiling(self) -> str | None:
        """The program that is being compiled right now, which may take minutes; may be read from any thread."""
        return self._programs.compiling

    def describe(self) -> list[tuple[str, str]]:
        """What the engine runs on and with, for a start-up banner."""
        device = self.mesh.devices.flat[0]
        replicated = self.target.layout.replicated()
        page_bytes = cache_bytes_per_token(self.target, self.drafter) * self.config.page_size
        drafting = f"block {self.drafter.config.block_size}" if isinstance(self.drafter, DFlashDrafter) else "none"
        return [
            ("devices", f"{self.mesh.size} × {device.device_kind}"),
            ("replicated axes", ", ".join(replicated) or "none"),
            ("target", f"{self.target.config.family}, {_size(self._programs.leaves)}"),
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
        self._schedule.queue(request)
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
        return self._schedule.pages.forget()

    def abort(self, request_id: int) -> None:
        """Ends a request; its slot and pages are free for the next call. The next `step` reports it."""
        request = self._schedule.open.get(request_id)
        if request is None:
            raise ValueError(f"request_id: found {request_id}, expected an open request")
        request.finish_reason = "abort"

    def step(self) -> list[RequestOutput]:
        """Dispatches what can run next, reads back the oldest call once two are in flight, and returns what is new."""
        outputs = self._drop_aborted()
        self._admit([request for request in self._schedule.assign() if request.to_prefill == 0])
        self._dispatch_prefill()
        # A grammar must have seen every token before it can say what may come next.
        most = 1 if any(r.matcher is not None for r in self._schedule.running.values()) else CALLS_IN_FLIGHT
        dispatched = len(self._in_flight) < most and self._dispatch_decode(outputs)
        if self._in_flight and (len(self._in_flight) >= most or not dispatched):
            self._collect(outputs)
        if self._schedule.waiting and not (self._schedule.running or outputs):
            raise RuntimeError(
                f"engine: {self.load.waiting} request(s) wait with every slot free and {self._schedule.pages.free} of "
                f"{self.page_count} pages; pages were lost, which is a fault of the engine"
            )
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
                f"generate: found {len(self._schedule.open)} open request(s), expected none; use add and step"
            )
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(f"sampling: found {len(sampling)}, expected one for each of {len(prompts)} prompts")
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
        for request in requests:
            self._schedule.queue(request)
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

    def _empty_caches(self) -> Caches:
        def pools(module: Any) -> Any:
            dtype = self._programs.leaves[0].dtype
            return empty_cache(
                module.cache_rows, self.page_count, self.config.page_size, module.layout, self.mesh, dtype
            )

        return Caches(target=pools(self.target), drafter=() if self.drafter is None else pools(self.drafter))

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

    def _drop_aborted(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for request in [r for r in self._schedule.open.values() if r.finish_reason == "abort"]:
            self._close(request, outputs)
        return outputs

    def _dispatch_prefill(self) -> None:
        """Processes the next chunk of every prompt that is not done, as far as one call's bound allows."""
        pending = self._schedule.prefilling
        if not pending:
            return
        longest = min(max(r.to_prefill for r in pending), self.config.prefill_chunk)
        chunk = bucket(longest, self.config.prefill_chunk, SMALLEST_PREFILL_BUCKET)
        sizes = self.config.batch_sizes
        # The largest batch within the bound on tokens, or the smallest there is.
        most = max((size for size in sizes if size * chunk <= PREFILL_TOKENS), default=sizes[0])
        pending = pending[:most]
        batch = self._schedule.batch_bucket(pending)
        tokens, following = np.zeros((2, batch, chunk), np.int32)
        start, count = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        for row, request in enumerate(pending):
            end = request.prefilled + min(request.to_prefill, chunk)
            start[row], count[row] = request.prefilled, end - request.prefilled
            tokens[row, : count[row]] = request.sequence[request.prefilled : end]
            following[row, : count[row]] = request.sequence[request.prefilled + 1 : end + 1]
        table = self._schedule.page_table(pending, batch)
        shape = PrefillShape(batch, table.shape[1], chunk, any(r.awaits_prompt_log_probs for r in pending))
        self._caches, log_probs = self._programs.prefill(shape, self._caches, tokens, start, count, table, following)
        for row, request in enumerate(pending):
            self._schedule.processed(request, int(count[row]))
            if request.awaits_prompt_log_probs:
                request.prompt_rows.append((log_probs, row, following[row, : count[row]].tolist()))
        self._admit([r for r in pending if r.to_prefill == 0])

    def _admit(self, requests: list[Request]) -> None:
        """Tells the device about requests whose context is in the cache."""
        if not requests:
            return
        slots = np.full(self.config.slots, self.config.slots, np.int32)
        rows = empty_rows(self.config.slots, MAX_STOP_IDS)
        for row, request in enumerate(requests):
            slots[row] = request.slot or 0
            rows.anchor[row] = request.sequence[-1]
            rows.length[row] = len(request.sequence) - 1
            rows.remaining[row] = request.limit - len(request.generated)
            rows.finished[row] = False
            rows.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
            rows.temperature[row] = 0.0 if request.sampling.greedy else request.sampling.temperature
            for name in ("top_p", "min_p", "top_k", "choice"):
                getattr(rows, name)[row] = getattr(request.sampling, name)
            rows.budget[row] = MAX_BUDGET if request.sampling.budget is None else request.sampling.budget
            rows.seed[row] = request.seed
        self._state = self._programs.admit(self._state, slots, rows)
        for request in requests:
            self._admit_adjustments(request)

    def _admit_adjustments(self, request: Request) -> None:
        """Tells the device how a request adjusts its logits, or clears what the slot's last request left."""
        slot, sampling = request.slot or 0, request.sampling
        if not sampling.adjusted and slot not in self._adjusted_slots:
            return
        row = adjustments_of(sampling, request.prompt, request.generated, self.target.config.vocab_size)
        self._adjustments = self._programs.adjust(self._adjustments, np.array([slot], np.int32), row)
        (self._adjusted_slots.add if sampling.adjusted else self._adjusted_slots.discard)(slot)

    def _dispatch_decode(self, outputs: list[RequestOutput]) -> bool:
        """Dispatches one call for the requests that decode; False where there are none."""
        rounds = self.speculation.rounds_per_call
        for request in self._schedule.decoding:
            while request.slot is not None and not self._schedule.reserve(request):
                self._make_room(outputs)
        requests = self._schedule.decoding
        if not requests:
            return False
        batch = self._schedule.batch_bucket(requests)
        slots = np.full(batch, self.config.slots, np.int32)
        slots[: len(requests)] = [r.slot or 0 for r in requests]
        capacity = np.zeros(batch, np.int32)
        capacity[: len(requests)] = [len(r.pages) * self.config.page_size for r in requests]
        table = self._schedule.page_table(requests, batch)
        shape = DecodeShape(batch, table.shape[1], work_of(r.sampling for r in requests), self.speculation)
        if any(r.matcher is not None for r in requests):
            rounds = 1
            result = self._guided_round(shape, requests, slots, table, capacity)
        else:
            self._caches, self._state, self._adjustments, result = self._programs.decode(
                shape, self._caches, self._state, self._adjustments, slots, table, capacity
            )
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        for request in requests:
            request.in_flight += rounds
        self._in_flight.append((result, requests))
        return True

    def _guided_round(
        self, shape: DecodeShape, requests: list[Request], slots: np.ndarray, table: np.ndarray, capacity: np.ndarray
    ) -> RoundResult:
        """One round in three programs; the host makes the grammars' masks while the target's pass runs."""
        tree = self._programs.draft(shape, self._caches, self._state, slots, table)
        output = self._programs.verify(shape, self._caches, self._state, slots, table, tree)
        tokens, parents, valid = (np.asarray(x) for x in (tree.tokens, tree.parents, tree.valid))
        words = -(-self.target.config.vocab_size // 32)
        allowed = np.full((*tokens.shape, words), 2**32 - 1, np.uint32)
        for row, request in enumerate(requests):
            if request.matcher is not None:
                allowed[row] = request.matcher.allowed(tokens[row], parents[row], valid[row])
        self._caches, self._state, self._adjustments, result = self._programs.settle(
            shape, self._caches, self._state, self._adjustments, slots, table, capacity, tree, output, allowed
        )
        return result

    def _make_room(self, outputs: list[RequestOutput]) -> None:
        """Frees pages: reads back every call in flight, then, if none ended a request, pauses the last in turn."""
        free = self._schedule.pages.free
        while self._in_flight:
            self._collect(outputs)
        if self._schedule.pages.free == free:
            self._schedule.pause_last()

    def _collect(self, outputs: list[RequestOutput]) -> None:
        """Reads back the oldest call in flight."""
        result, requests = self._in_flight.popleft()
        tokens, counts, accepted, drafted, finished = (
            np.asarray(x) for x in (result.tokens, result.count, result.accepted, result.drafted, result.finished)
        )  # [rounds, batch, ...]
        depth = tokens.shape[-1] - 1
        for row, request in enumerate(requests):
            request.in_flight -= len(tokens)
            if request.id not in self._schedule.open or request.finish_reason is not None:
                continue
            new: list[int] = []
            log_probs: list[TokenLogProb] = []
            rounds: list[RoundCounts] = []
            for index in np.flatnonzero(counts[:, row]):
                done = RoundCounts(*(int(x[index, row]) for x in (counts, accepted, drafted)))
                chosen = tokens[index, row, : done.produced].tolist()
                new += chosen
                if request.sampling.log_probs is not None:
                    rows = jax.tree.map(lambda array, index=index: np.asarray(array)[index], result.log_probs)
                    log_probs += host_log_probs(rows, row, chosen, request.sampling.log_probs)
                request.statistics.record(done, depth)
                rounds.append(done)
            request.generated += new
            if request.matcher is not None:
                request.matcher.advance(new)
            request.prefilled += len(new)
            if request.matcher is not None and request.matcher.failed:
                request.finish_reason = "grammar"
                self._close(request, outputs, new, rounds, log_probs)
            elif finished[-1, row]:
                request.finish_reason = "stop" if request.generated[-1] in request.stop_ids else "length"
                self._close(request, outputs, new, rounds, log_probs)
            elif new:
                outputs.append(self._output(request, new, rounds, log_probs))

    def _close(
        self,
        request: Request,
        outputs: list[RequestOutput],
        new: Sequence[int] = (),
        rounds: Sequence[RoundCounts] = (),
        log_probs: Sequence[TokenLogProb] = (),
    ) -> None:
        self._schedule.close(request)
        outputs.append(self._output(request, new, rounds, log_probs))

    def _output(
        self, request: Request, new: Sequence[int], rounds: Sequence[RoundCounts], log_probs: Sequence[TokenLogProb]
    ) -> RequestOutput:
        """What a step brought for a request, the prompt's log-probabilities with its first tokens."""
        queued, request.queued_seconds = request.queued_seconds, None
        return RequestOutput(
            request.id,
            list(new),
            request.finish_reason,
            request.statistics if request.finish_reason is not None else None,
            tuple(rounds),
            list(log_probs),
            request.take_prompt_log_probs() if new else [],
            request.statistics.cached_tokens,
            queued,
        )


def check_tokenizers(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raises ValueError where the drafter's tokenizer gives other ids than the target's."""
    if target.fingerprint != drafter.fingerprint:
        raise ValueError(
            f"drafter tokenizer: found fingerprint {drafter.fingerprint[:12]}, but the target's is "
            f"{target.fingerprint[:12]}: a drafter of another tokenizer"
        )


def _size(leaves: tuple[jax.Array, ...]) -> str:
    return f"{sum(leaf.nbytes for leaf in leaves) / 1e9:.2f} GB of weights, {leaves[0].dtype}"
