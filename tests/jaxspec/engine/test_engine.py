"""The engine: what a request answers depends on nothing but the request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.scheduler import CALLS_AHEAD
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import DFLASH, GROUPED, Plan, finish, oracle, oracle_drafting, tiny_dflash, tiny_target

BLOCK = 8
LIMIT = 30
CONTEXT = 64
REQUESTS = 12
LENGTHS = (1, 2, 5, 9, 16, 30, 34, 1, 3, 20, 33, 8)


def sampling(index: int, **changes: Any) -> SamplingParams:
    return replace(SamplingParams(temperature=1, seed=1000 + index, max_tokens=LIMIT, ignore_eos=True), **changes)


@dataclass(frozen=True)
class World:
    """Prompts, what plain decoding answers to each, and engines with an oracle.

    `engine` drafts perfectly for the even requests and at random ranks for the odd ones. `cramped` does so for all, and
    its cache has 16 pages for four requests that want up to 16 each.
    """

    plain: Engine
    engine: Engine
    cramped: Engine
    prompts: list[list[int]]
    answers: list[list[int]]

    def add(self, index: int, **changes: Any) -> int:
        return self.engine.add(self.prompts[index], sampling(index, **changes))

    def idle(self, engine: Engine | None = None) -> None:
        """Everything that a finished engine must have given back."""
        engine = engine or self.engine
        while engine._in_flight:
            engine.step()
        assert not engine.has_work
        assert not engine._scheduler.running
        assert not engine._scheduler.waiting
        assert engine._scheduler.pages.free == engine.page_count


@pytest.fixture(scope="module")
def world() -> World:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, GROUPED.vocab_size, length).tolist() for length in LENGTHS]
    prompts[4][:3] = [DFLASH.mask_token_id] * 3
    plain = Engine(
        tiny_target(),
        mesh=make_mesh(1),
        speculation=SpeculationConfig(budget=0),
        config=EngineConfig(slots=12, batch_buckets=(12,), max_context=CONTEXT, prefill_chunk=64),
    )
    answers = [done.tokens for done in plain.generate(prompts, [sampling(i) for i in range(REQUESTS)])]
    plans = [Plan(1000 + i, prompts[i], answers[i], [] if i % 2 else [(BLOCK - 1, 0)] * LIMIT) for i in range(REQUESTS)]

    def guessing(plans: list[Plan], **sizes: Any) -> Engine:
        return Engine(
            tiny_target(),
            oracle(plans, 8, BLOCK - 1, 1),
            mesh=make_mesh(1),
            speculation=SpeculationConfig(budget=8, top_k_cap=2),
            config=EngineConfig(slots=4, page_size=4, max_context=CONTEXT, prefill_chunk=16, **sizes),
            make_drafting=oracle_drafting,
        )

    cramped = guessing([replace(plan, rounds=[]) for plan in plans], cache_tokens=64, batch_buckets=(4,))
    return World(plain, guessing(plans), cramped, prompts, answers)


def test_prompts_of_any_length_in_any_order_answer_the_same(world: World) -> None:
    """More requests than slots, one token to several chunks, the mask id among them."""
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(REQUESTS).tolist()
        ids = [world.add(index) for index in order]
        done = finish(world.engine, ids)
        for index, request_id in zip(order, ids, strict=True):
            tokens, reason, statistics = done[request_id]
            assert tokens == world.answers[index]
            assert reason == "length"
            if index % 2 == 0:
                assert statistics.rounds == -(-LIMIT // BLOCK)
        world.idle()


def test_a_stop_id_ends_the_answer_at_every_place_of_a_block(world: World) -> None:
    """Rounds of these requests bring 8 tokens, so place p is offset p % 8; 7 is the bonus, 0 the very first token."""
    expected = {}
    for index in range(0, REQUESTS, 2):
        answer = world.answers[index]
        for place, token in enumerate(answer):
            if answer.index(token) == place:
                expected[world.add(index, stop_token_ids=(token,))] = answer[: place + 1]
    done = finish(world.engine, list(expected))
    for request_id, answer in expected.items():
        assert done[request_id][0] == answer
        assert done[request_id][1] == "stop"
    places = {len(answer) - 1 for answer in expected.values()}
    assert places >= {*range(BLOCK), *range(BLOCK, 2 * BLOCK)}
    world.idle()


def test_the_limit_ends_the_answer_at_every_place_of_a_block(world: World) -> None:
    expected = {world.add(0, max_tokens=limit): limit for limit in range(1, 2 * BLOCK + 3)}
    done = finish(world.engine, list(expected))
    for request_id, limit in expected.items():
        assert done[request_id][:2] == (world.answers[0][:limit], "length")
        assert done[request_id][2].rounds == -(-limit // BLOCK)
    world.idle()


def test_the_context_limit_ends_an_answer(world: World) -> None:
    long = world.prompts[6] + world.answers[6][: CONTEXT - 3 - len(world.prompts[6])]
    assert len(long) == CONTEXT - 3
    (done,) = world.engine.generate([long], sampling(6))
    assert done.tokens == world.answers[6][CONTEXT - 3 - len(world.prompts[6]) :][:3]
    assert done.finish_reason == "length"
    world.idle()


def test_the_models_own_end_ids_count_unless_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.answers[2]
    place = next(p for p in range(3, LIMIT) if answer.index(answer[p]) == p)
    ends = replace(world.engine._admission, eos_token_ids=(answer[place],))
    monkeypatch.setattr(world.engine, "_admission", ends)
    ids = [world.add(2, ignore_eos=ignore) for ignore in (False, True)]
    done = finish(world.engine, ids)
    assert done[ids[0]][:2] == (answer[: place + 1], "stop")
    assert done[ids[1]][:2] == (answer, "length")


def test_an_abort_leaves_the_others_alone_and_frees_everything(world: World) -> None:
    ids = [world.add(index) for index in range(1, 8)]  # 4 run, 3 wait
    outputs: list[Any] = []
    for _ in range(3):
        outputs += world.engine.step()
    assert world.engine._in_flight
    ended = [ids[1], ids[6]]
    for request_id in ended:
        world.engine.abort(request_id)
    while world.engine.has_work:
        outputs += world.engine.step()
    for place, request_id in enumerate(ids):
        mine = [output for output in outputs if output.request_id == request_id]
        tokens = [token for output in mine for token in output.tokens]
        assert [output.finish_reason for output in mine[:-1]] == [None] * (len(mine) - 1)
        answer = world.answers[1 + place]
        if request_id in ended:
            assert mine[-1].finish_reason == "abort"
            assert tokens == answer[: len(tokens)]
            assert len(tokens) < LIMIT
        else:
            assert (tokens, mine[-1].finish_reason) == (answer, "length")
    world.idle()
    with pytest.raises(ValueError, match=f"request_id: found {ids[0]}, expected an open request"):
        world.engine.abort(ids[0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["engine", "cramped"])
def test_random_traffic(world: World, name: str, seed: int) -> None:
    """Adds, aborts and steps at random; a Python model says what each request must bring."""
    engine: Engine = getattr(world, name)
    rng = np.random.default_rng(seed)
    expected: dict[int, tuple[list[int], str]] = {}
    live: set[int] = set()
    aborted: set[int] = set()
    tokens: dict[int, list[int]] = {}
    ended: dict[int, str] = {}

    def step() -> None:
        for output in engine.step():
            assert output.request_id not in ended, "an output after the last one"
            tokens[output.request_id] += output.tokens
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
                live.discard(output.request_id)

    for _ in range(120):
        action = rng.choice(["add", "step", "abort"], p=[0.35, 0.55, 0.1])
        if action == "add":
            index, limit = int(rng.integers(REQUESTS)), int(rng.integers(1, LIMIT + 1))
            answer = world.answers[index][:limit]
            stop = (int(rng.choice(world.answers[index])),) if rng.random() < 0.5 else ()
            stopped = bool(stop) and stop[0] in answer
            request_id = engine.add(world.prompts[index], sampling(index, max_tokens=limit, stop_token_ids=stop))
            expected[request_id] = (answer[: answer.index(stop[0]) + 1], "stop") if stopped else (answer, "length")
            live.add(request_id)
            tokens[request_id] = []
        elif action == "abort" and live - aborted:
            victim = int(rng.choice(sorted(live - aborted)))
            engine.abort(victim)
            aborted.add(victim)
        else:
            step()
    while engine.has_work:
        step()
    assert set(ended) == set(expected)
    for request_id, (answer, reason) in expected.items():
        if request_id in aborted:
            assert ended[request_id] == "abort"
            assert tokens[request_id] == answer[: len(tokens[request_id])]
        else:
            assert (tokens[request_id], ended[request_id]) == (answer, reason)
    world.idle(engine)


def test_calls_are_dispatched_ahead(world: World) -> None:
    request_id = world.add(1)
    assert world.engine.step() == []
    assert len(world.engine._in_flight) == 1, "the first call is not waited for"
    most = 0
    while world.engine.has_work:
        finished = [output.finish_reason for output in world.engine.step() if output.request_id == request_id]
        most = max(most, len(world.engine._in_flight))
    assert finished == ["length"]
    assert most == CALLS_AHEAD - 1, "each step reads one call back once two are in flight"
    world.idle()


def test_statistics_add_up(world: World) -> None:
    ids = [world.add(index) for index in range(REQUESTS)]
    done = finish(world.engine, ids)
    total = done[ids[0]][2].__class__()
    for tokens, _, statistics in done.values():
        assert statistics.produced == len(tokens)
        assert sum(statistics.accepted_lengths) == statistics.rounds
        assert statistics.drafted == 8 * statistics.rounds
        assert statistics.tau == len(tokens) / statistics.rounds
        total.merge(statistics)
    assert total.produced == REQUESTS * LIMIT
    depths = total.acceptance_by_depth
    assert len(depths) == BLOCK - 1
    assert depths == sorted(depths, reverse=True)
    assert 1 >= depths[0] > depths[-1] > 0


def test_each_request_may_have_a_lower_budget(world: World) -> None:
    budgets = (None, 0, 3, 8)
    done = finish(world.engine, ids := [world.add(0, budget=budget) for budget in budgets])
    for request_id, budget in zip(ids, budgets, strict=True):
        tokens, _, statistics = done[request_id]
        assert tokens == world.answers[0]
        assert statistics.drafted == (8 if budget is None else budget) * statistics.rounds
    unlimited, plain, limited, whole = (done[i][2].rounds for i in ids)
    assert unlimited == whole == -(-LIMIT // BLOCK) < limited < plain == LIMIT
    with pytest.raises(ValueError, match="budget: found 9, expected at most the engine's 8"):
        world.add(0, budget=9)
    world.idle()


def test_requests_that_outgrow_the_cache_pause_and_resume(world: World) -> None:
    engine = world.cramped
    ids = [engine.add(world.prompts[index], sampling(index)) for index in range(REQUESTS)]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    paused, running = set(), 0
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
        paused |= {request.id for request in engine._scheduler.waiting if request.generated}
        running = max(running, len(engine._scheduler.running))
        for request in engine._scheduler.waiting:
            assert all(request.id > other.id for other in engine._scheduler.running.values()), "the youngest gives way"
    assert list(tokens.values()) == world.answers
    assert len(paused) >= 2
    assert running >= 2
    world.idle(engine)


def test_a_temperature_too_small_for_float32_is_greedy(world: World) -> None:
    answers = [world.plain.generate(world.prompts[:2], sampling(0, temperature=t)) for t in (0.0, 1e-38)]
    greedy, cold = [[done.tokens for done in each] for each in answers]
    assert greedy == cold


def test_levels_mix_in_one_batch_beside_a_real_drafter(world: World) -> None:
    """Greedy, sampled and filtered requests, answered together by the DFlash round and apart by plain decoding."""
    params = [
        sampling(0, temperature=0, max_tokens=9),
        sampling(1, max_tokens=12),
        sampling(2, temperature=0.8, top_p=0.9, top_k=12, max_tokens=20),
        sampling(3, temperature=1.5, min_p=0.1, max_tokens=20),
    ]
    prompts = world.prompts[4:8]
    expected = [done.tokens for done in world.plain.generate(prompts, params)]
    engine = Engine(
        tiny_target(),
        tiny_dflash(),
        mesh=make_mesh(1),
        speculation=SpeculationConfig(budget=6, top_k_cap=3),
        config=EngineConfig(slots=4, max_context=CONTEXT, prefill_chunk=64),
    )
    assert [done.tokens for done in engine.generate(prompts, params)] == expected
    assert engine._scheduler.pages.free == engine.page_count


def test_seed_and_choice_key_the_noise_and_an_unset_seed_is_drawn(world: World) -> None:
    params = [
        sampling(0, seed=None),
        sampling(0, seed=None),
        sampling(0, seed=5),
        sampling(0, seed=5),
        sampling(0, seed=5, choice=1),
    ]
    a, b, c, d, e = (done.tokens for done in world.plain.generate([world.prompts[0]] * 5, params))
    assert c == d
    assert len({tuple(tokens) for tokens in (a, b, c, e)}) == 4


def test_weights_and_settings_are_not_touched_by_running(world: World) -> None:
    engine = world.engine
    before = [np.array(leaf) for leaf in jax.tree.leaves(engine.runner.programs.leaves)]
    world.engine.generate([world.prompts[0]], sampling(0))
    for old, new in zip(before, engine.runner.programs.leaves, strict=True):
        np.testing.assert_array_equal(old, new)


def test_speculation_changes_between_requests_only(world: World) -> None:
    request_id = world.add(0, max_tokens=1)
    with pytest.raises(ValueError, match=r"speculation: 1 request\(s\) open, expected none"):
        world.engine.speculation = SpeculationConfig(budget=4)
    finish(world.engine, [request_id])
    kept = world.engine.speculation
    for wrong, message in (
        (SpeculationConfig(draft_length=8), "draft_length: found 8, expected 1 to 7"),
        (SpeculationConfig(top_k_cap=65), "top_k_cap: found 65, expected at most the vocabulary's 64"),
    ):
        with pytest.raises(ValueError, match=message):
            world.engine.speculation = wrong
    assert world.engine.speculation == kept
    world.plain.speculation = SpeculationConfig(budget=32, rounds_per_call=1)
    assert world.plain.speculation.budget == 0, "without a drafter the engine decodes plainly"


def test_a_shorter_draft_answers_the_same(world: World) -> None:
    kept = world.engine.speculation
    world.engine.speculation = replace(kept, draft_length=2)
    try:
        (done,) = world.engine.generate([world.prompts[0]], sampling(0))
    finally:
        world.engine.speculation = kept
    assert done.tokens == world.answers[0]
    assert len(done.statistics.accepted_lengths) == 3


@pytest.mark.parametrize(
    "sizes", [{"max_context": 2}, {"cache_tokens": 8, "page_size": 4}, {"cache_tokens": 2, "page_size": 1}]
)
def test_warm_up_fits_the_smallest_engines(sizes: dict[str, int]) -> None:
    engine = Engine(tiny_target(), mesh=make_mesh(1), config=EngineConfig(slots=1, **sizes))
    engine.warm_up()
    assert not engine.has_work


def test_no_program_copies_the_cache() -> None:
    """Neither before it writes nor to convert it, bfloat16 on a CPU included."""
    target, drafter = tiny_target(dtype=jnp.bfloat16), tiny_dflash(dtype=jnp.bfloat16)
    config = EngineConfig(slots=1, max_context=32, cache_tokens=2**17)
    engine = Engine(target, drafter, mesh=make_mesh(1), config=config, speculation=SpeculationConfig(4))
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
    pool = min(pool.nbytes for pool in jax.tree.leaves(engine.runner.carry.caches))
    used = {
        str(key): program.memory_analysis().temp_size_in_bytes
        for key, program in engine.runner.programs.compiled.items()
    }
    assert max(used.values()) < pool / 2, used


def test_warm_up_and_description() -> None:
    lines: list[str] = []
    engine = Engine(
        tiny_target(devices=2),
        mesh=make_mesh(2),
        config=EngineConfig(slots=1, max_context=CONTEXT),
        report=lines.append,
    )
    engine.warm_up()
    assert not engine.has_work
    assert any("decode" in line for line in lines)
    compiled = len(lines)
    engine.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=3))
    assert len(lines) == compiled, "a short greedy request compiles nothing after the warm-up"
    facts = dict(engine.describe())
    assert facts["devices"].startswith("2 × ")
    assert facts["cache"].startswith(f"{CONTEXT // 16} pages of 16")


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "prompt: found 0 tokens, expected at least 1"),
            ([1] * CONTEXT, rf"prompt: found {CONTEXT} tokens, expected at most {CONTEXT - 1} \(context limit\)"),
            ([3, 64], "prompt: found token id 64, expected 0 to 63"),
            ([3, -1], "prompt: found token id -1, expected 0 to 63"),
            ([3, 1.5], "prompt: 'float' object .*, expected token ids 0 to 63"),
            (["3"], "prompt: 'str' object .*, expected token ids 0 to 63"),
        ],
    )
    def test_prompts(self, world: World, prompt: Sequence[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            world.engine.add(prompt)
        assert not world.engine.has_work

    @pytest.mark.parametrize(
        ("kind", "fields", "message"),
        [
            (SpeculationConfig, {"budget": -1}, "budget: found -1, expected 0 to 1024"),
            (SpeculationConfig, {"budget": 1025}, "budget: found 1025, expected 0 to 1024"),
            (SpeculationConfig, {"top_k_cap": 0}, "top_k_cap: found 0, expected 1 to 1024"),
            (SpeculationConfig, {"draft_length": 0}, "draft_length: found 0"),
            (SpeculationConfig, {"rounds_per_call": 0}, "rounds_per_call: found 0"),
            (SamplingParams, {"temperature": -0.1}, "temperature: found -0.1, expected 0.0 to 100.0"),
            (SamplingParams, {"temperature": float("nan")}, "temperature: found nan, expected 0.0 to 100.0"),
            (SamplingParams, {"top_p": 0.0}, "top_p: found 0.0"),
            (SamplingParams, {"top_p": float("nan")}, "top_p: found nan"),
            (SamplingParams, {"top_k": -1}, "top_k: found -1"),
            (SamplingParams, {"min_p": 1.1}, "min_p: found 1.1, expected 0.0 to 1.0"),
            (SamplingParams, {"max_tokens": 0}, "max_tokens: found 0"),
            (SamplingParams, {"seed": 2**32}, "seed: found 4294967296"),
            (EngineConfig, {"slots": 0}, "slots: found 0, expected 1 to 256"),
            (EngineConfig, {"slots": 257}, "slots: found 257, expected 1 to 256"),
            (EngineConfig, {"page_size": 0}, "page_size: found 0"),
            (EngineConfig, {"slots": 1.5}, "slots: found 1.5, expected an integer from 1 to 256"),
            (EngineConfig, {"cache_tokens": float("inf")}, "cache_tokens: found inf, expected an integer"),
            (SpeculationConfig, {"budget": True}, "budget: found True, expected an integer"),
            (SpeculationConfig, {"budget": "8"}, "budget: found '8', expected an integer"),
            (SamplingParams, {"max_tokens": 2.5}, "max_tokens: found 2.5, expected an integer"),
            (SamplingParams, {"temperature": None}, "temperature: found None, expected a number from 0.0 to 100.0"),
            (SamplingParams, {"seed": 1.5}, "seed: found 1.5, expected an integer"),
            (SamplingParams, {"stop_token_ids": 5}, "stop_token_ids: found 5, expected a tuple of token ids"),
            (SamplingParams, {"stop_token_ids": (1.5,)}, r"stop_token_ids: found \(1.5,\), expected a tuple"),
        ],
    )
    def test_settings(self, kind: type, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.{message}"):
            kind(**fields)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 16}, "drafter hidden_size: found 16, but the target has 32"),
            ({"vocab_size": 63}, "drafter vocab_size: found 63, but the target has 64"),
            ({"num_target_layers": 9}, "drafter num_target_layers: found 9, but the target has 2"),
            ({"target_layer_ids": (1,)}, "drafter target_layer_ids: found 1, expected 0 to 0"),
        ],
    )
    def test_a_drafter_of_another_target(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Engine(tiny_target(), tiny_dflash(replace(DFLASH, **changes)), mesh=make_mesh(1))

    def test_more_stop_ids_than_there_is_room_for(self, world: World) -> None:
        with pytest.raises(ValueError, match="stop_token_ids: found 17 with the model's own, expected at most 16"):
            world.add(0, stop_token_ids=tuple(range(17)))

    def test_end_ids_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="eos_token_ids: found -5, expected 0 to 63"):
            Engine(tiny_target(), mesh=make_mesh(1), eos_token_ids=(-5,))

    def test_a_stop_id_out_of_range(self, world: World) -> None:
        with pytest.raises(ValueError, match="stop_token_ids: found token id 64, expected 0 to 63"):
            world.add(0, stop_token_ids=(64,))

    def test_generating_beside_open_requests(self, world: World) -> None:
        """It would swallow their outputs."""
        request = world.add(0)
        with pytest.raises(ValueError, match=r"generate: found 1 open request\(s\), expected none"):
            world.engine.generate([[1]])
        assert finish(world.engine, [request])[request][0] == world.answers[0]

    def test_one_bad_prompt_of_several_queues_none(self, world: World) -> None:
        with pytest.raises(ValueError, match="prompt: found token id 64"):
            world.engine.generate([[1], [64]])
        assert not world.engine.has_work

    def test_a_context_beyond_the_models(self) -> None:
        with pytest.raises(ValueError, match="max_context: found 257, expected at most the models' 256"):
            Engine(tiny_target(), mesh=make_mesh(1), config=EngineConfig(max_context=257))

    def test_a_request_larger_than_the_whole_cache(self) -> None:
        engine = Engine(tiny_target(), mesh=make_mesh(1), config=EngineConfig(slots=1, cache_tokens=32))
        with pytest.raises(ValueError, match="prompt: needs a cache of 40 tokens with its answer, expected at most 32"):
            engine.add([1] * 30, SamplingParams(max_tokens=10))

    def test_a_cache_larger_than_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("jaxspec.engine.memory.available_bytes", lambda mesh: 1000)
        with pytest.raises(ValueError, match="cache_tokens: 4096 tokens need .* GB .*, found 0.00 GB free"):
            Engine(tiny_target(), mesh=make_mesh(1))

    def test_prompts_and_settings_of_different_number(self, world: World) -> None:
        with pytest.raises(ValueError, match="sampling: found 1, expected one for each of 2 prompts"):
            world.engine.generate([[1], [2]], [SamplingParams()])


def test_a_beginning_that_is_cached_changes_no_answer(world: World) -> None:
    """The same prompt again, its answer as the next turn's prompt, and a beginning of it; pages of 4 tokens."""
    engine, prompt = world.engine, world.prompts[6]
    engine.forget_prefixes()
    cold = finish(engine, [world.add(6)])
    warm = finish(engine, [world.add(6)])
    ((first, _, first_statistics), (second, _, second_statistics)) = (*cold.values(), *warm.values())
    assert first == second == world.answers[6]
    assert first_statistics.cached_tokens == 0
    assert second_statistics.cached_tokens == (len(prompt) - 1) // 4 * 4

    (turn,) = engine.generate([prompt + first[:20]], sampling(6, max_tokens=10))
    assert turn.tokens == world.answers[6][20:]
    assert turn.statistics.cached_tokens == (len(prompt) + 19) // 4 * 4
    (part,) = engine.generate([prompt[:10]], sampling(6))
    assert part.statistics.cached_tokens == 8
    assert part.tokens == world.plain.generate([prompt[:10]], sampling(6))[0].tokens
    world.idle()


def test_a_beginning_is_processed_once_for_requests_that_come_together(world: World) -> None:
    """33 tokens in chunks of 16, pages of 4: the others wait for the first one's pages, not for its end."""
    engine, prompt = world.engine, world.prompts[6]
    engine.forget_prefixes()
    others = [prompt[:18], [*prompt[:32], 5, 6, 7]]
    ids = [world.add(6), *(engine.add(other, sampling(6)) for other in others), world.add(0)]
    engine.step()
    assert [request.id for request in engine._scheduler.waiting] == ids[1:3], "an unlike request overtakes them"
    engine.step()
    assert [request.id for request in engine._scheduler.waiting] == ids[2:3]
    done = finish(engine, ids)
    assert [done[i][2].cached_tokens for i in ids] == [0, 16, 32, 0]
    assert done[ids[0]][0] == world.answers[6]
    for request_id, other in zip(ids[1:3], others, strict=True):
        assert done[request_id][0] == world.plain.generate([other], sampling(6))[0].tokens
    world.idle()


def test_prefixes_give_way_to_requests_and_are_forgotten_on_demand(world: World) -> None:
    engine = world.cramped
    engine.forget_prefixes()
    for index in (5, 6, 9, 10):
        assert engine.generate([world.prompts[index]], sampling(index))[0].tokens == world.answers[index]
    assert engine.forget_prefixes() > 0
    (done,) = engine.generate([world.prompts[6]], sampling(6))
    assert done.statistics.cached_tokens == 0
    world.idle(engine)


def test_a_request_that_is_aborted_leaves_only_whole_true_pages(world: World) -> None:
    engine = world.engine
    for steps in (1, 2, 3, 4):
        engine.forget_prefixes()
        request_id = world.add(6)
        for _ in range(steps):
            engine.step()
        engine.abort(request_id)
        (done,) = [finish(engine, [i])[i] for i in [world.add(6)]]
        assert done[0] == world.answers[6]
    world.idle()


def test_higher_priorities_are_served_first_and_paused_last(world: World) -> None:
    engine = world.engine
    slots = engine.config.slots
    low = [engine.add(world.prompts[i], sampling(i)) for i in range(slots)]
    engine.step()
    late = engine.add(world.prompts[4], sampling(4))
    urgent = engine.add(world.prompts[5], sampling(5), priority=3)
    assert [request.id for request in engine._scheduler.waiting] == [urgent, late]
    done = finish(engine, [*low, late, urgent])
    assert [done[i][0] for i in (*low, late, urgent)] == world.answers[:slots] + world.answers[4:6]

    cramped, order = world.cramped, (0, 1, 2, 3)
    ids = [cramped.add(world.prompts[i], sampling(i), priority=place) for place, i in enumerate(order)]
    paused = set()
    answers: dict[int, list[int]] = {i: [] for i in ids}
    while cramped.has_work:
        for output in cramped.step():
            answers[output.request_id] += output.tokens
        paused |= {request.id for request in cramped._scheduler.waiting if request.generated}
    assert paused
    assert ids[-1] not in paused
    assert [answers[i] for i in ids] == [world.answers[i] for i in order]
    world.idle(cramped)
