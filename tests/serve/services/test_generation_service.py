"""GenerationService of a real server process, over loopback, against the engine used directly."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from jaxspec.config import Grammar, SamplingParams
from jaxspec.v1 import admin_pb2
from jaxspec.v1 import generation_pb2 as pb
from tests.support.requests import GREEDY, begun, load, request, streamed, wait_until
from tests.support.server_process import QUEUE, SLOTS


def test_a_stream_is_the_plain_engines_answer(generation, plain):
    (expected,) = plain.generate([plain.tokenizer.encode("Hello")], SamplingParams(temperature=0, max_tokens=24))
    tokens, text, finished, events = streamed(generation, request())
    assert tokens == expected.tokens
    assert text == plain.tokenizer.decode(tokens)
    accepted = events[0].accepted
    assert (accepted.model, accepted.prompt_tokens, len(accepted.request_id)) == ("tiny", 5, 16)
    assert finished.ending.reason == pb.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 24)
    assert len(events) > 5


def test_statistics_add_up(generation):
    _, _, finished, events = streamed(generation, request("ab" * 20, max_tokens=120))
    statistics = finished.ending.speculation
    histogram = list(statistics.acceptance_histogram)
    assert len(histogram) == 4
    assert sum(histogram) == statistics.rounds
    assert statistics.accepted_draft_tokens == sum(depth * rounds for depth, rounds in enumerate(histogram)) > 0
    assert statistics.rounds + statistics.accepted_draft_tokens == 120
    assert statistics.draft_tokens == 6 * statistics.rounds
    assert statistics.mean_acceptance_length == pytest.approx(120 / statistics.rounds)
    assert statistics.draft_acceptance_rate == pytest.approx(statistics.accepted_draft_tokens / statistics.draft_tokens)
    assert sum(event.delta.from_draft for event in events) == statistics.accepted_draft_tokens


def test_a_request_may_decode_plainly(generation):
    tokens, _, finished, _ = streamed(generation, request("ab" * 20, speculation__enabled=False))
    assert tokens == streamed(generation, request("ab" * 20, speculation__enabled=True))[0]
    assert (finished.ending.speculation.rounds, finished.ending.speculation.draft_tokens) == (24, 0)


def test_sampled_choices_are_those_of_the_engine(generation, plain):
    prompt = plain.tokenizer.encode("Hi")
    settings = [SamplingParams(temperature=1, top_p=0.75, seed=7, max_tokens=20, choice=n) for n in range(3)]
    expected = plain.generate([prompt] * 3, settings)
    sampling = {"temperature": 1, "top_p": 0.75, "seed": 7, "choices": 3}
    answer = generation.Generate(request("Hi", sampling, 20))
    assert [list(choice.token_ids) for choice in answer.choices] == [one.tokens for one in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 60)
    events = list(generation.GenerateStream(pb.GenerateStreamRequest(request=request("Hi", sampling, 20))))
    for choice in answer.choices:
        deltas = [e.delta for e in events if e.HasField("delta") and e.delta.choice == choice.index]
        assert "".join(delta.text for delta in deltas) == choice.text
    ends = [event.finished for event in events if event.HasField("finished")]
    assert sorted(end.choice for end in ends) == [0, 1, 2]
    assert [end.HasField("usage") for end in ends] == [False, False, True]
    assert ends[-1].usage == answer.usage


PENALTIES = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {65: 2.0, 66: -100.0},
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_adjusted_answers_and_log_probs_are_the_plain_engines(generation, plain, temperature):
    prompt = plain.tokenizer.encode("Hello")
    settings = PENALTIES | {"logit_bias": tuple(PENALTIES["logit_bias"].items())}
    expected = plain.generate(
        [prompt],
        SamplingParams(
            **settings, temperature=temperature, seed=5, max_tokens=24, min_tokens=4, log_probs=3, prompt_log_probs=0
        ),
    )[0]
    asked = request(
        sampling=PENALTIES | {"temperature": temperature, "seed": 5},
        stopping__min_tokens=4,
        output__logprobs=3,
        output__prompt_logprobs=0,
    )
    tokens, _, _, events = streamed(generation, asked)
    assert tokens == expected.tokens
    assert 66 not in tokens
    answer = generation.Generate(asked)
    streams = [
        [entry for event in events for entry in event.delta.logprobs],
        [entry for event in events for entry in event.delta.prompt_logprobs],
    ]
    for sent, whole, wanted, top in (
        (streams[0], answer.choices[0].logprobs, expected.log_probs, 3),
        (streams[1], answer.prompt_logprobs, expected.prompt_log_probs, 0),
    ):
        assert [entry.token_id for entry in sent] == [entry.token_id for entry in whole]
        assert [entry.token_id for entry in sent] == [entry.token for entry in wanted]
        assert [entry.logprob for entry in sent] == pytest.approx([entry.log_prob for entry in wanted], abs=1e-4)
        assert {len(entry.top) for entry in sent} == {top}
    assert [entry.token for entry in expected.prompt_log_probs] == prompt[1:]


@pytest.mark.parametrize(
    ("rule", "check"),
    [
        ({"regex": "(yes|no)[!?]{2,5}"}, lambda text: re.fullmatch("(yes|no)[!?]{2,5}", text)),
        ({"grammar": 'start: "a" /[0-9]{3}/'}, lambda text: re.fullmatch("a[0-9]{3}", text)),
        (
            {"json_schema": '{"enum": ["red", "green"], "x-guidance": {"whitespace_flexible": false}}'},
            lambda text: json.loads(text) in ("red", "green"),
        ),
    ],
)
def test_structured_answers_meet_their_rule_with_trees_and_without(generation, plain, rule, check):
    asked = request(sampling={"temperature": 1, "seed": 3}, structured_output=rule)
    tokens, text, finished, _ = streamed(generation, asked)
    assert check(text)
    assert finished.ending.reason == pb.FINISH_REASON_STOP
    (kind, source), *_ = rule.items()
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=24, grammar=Grammar("lark" if kind == "grammar" else kind, source)
    )
    assert tokens == plain.generate([plain.tokenizer.encode("Hello")], params)[0].tokens


def test_a_turn_finds_the_last_one_in_the_cache(generation, admin, plain):
    """Pages of 16 tokens: 40 of the prompt, 24 of the answer, 5 more. The last token of an answer is not processed."""
    admin.FlushCache(admin_pb2.FlushCacheRequest())
    first = streamed(generation, request("x" * 40))
    again = streamed(generation, request("x" * 40, priority=1))
    assert again[:2] == first[:2]
    assert (first[2].usage.cached_tokens, again[2].usage.cached_tokens) == (0, 32)
    turn = generation.Generate(request([*plain.tokenizer.encode("x" * 40), *first[0], 1, 2, 3, 4, 5], max_tokens=4))
    assert turn.usage.cached_tokens == 48
    admin.FlushCache(admin_pb2.FlushCacheRequest())
    assert streamed(generation, request("x" * 40))[2].usage.cached_tokens == 0


def test_any_json_object_can_be_asked_for(generation):
    asked = request(sampling={"temperature": 1, "seed": 3}, structured_output__json_object=True, max_tokens=8)
    assert streamed(generation, asked)[1].lstrip().startswith("{")


def test_a_drawn_seed_differs_from_call_to_call(generation):
    answers = {
        generation.Generate(request(sampling={"temperature": 1, "top_p": 0.99})).choices[0].text for _ in range(3)
    }
    assert len(answers) == 3


def test_stop_strings_end_text_and_tokens_and_free_the_slot(generation, model, plain):
    (whole,) = plain.generate([plain.tokenizer.encode("Hello")], SamplingParams(temperature=0, max_tokens=100))
    text = plain.tokenizer.decode(whole.tokens)
    stop = text[40:43]
    assert text.index(stop) == 40
    kept = next(n for n in range(100) if len(plain.tokenizer.decode(whole.tokens[:n]).rstrip("\ufffd")) >= 43)
    built = request(max_tokens=900, stopping__stop=["never comes", stop])
    before = load(model).speculation.rounds
    tokens, found, finished, _ = streamed(generation, built)
    assert found == text[:40]
    assert tokens == whole.tokens[:kept]
    assert finished.ending.reason == pb.FINISH_REASON_STOP
    assert finished.ending.stop_string == stop
    assert finished.usage.completion_tokens == kept
    wait_until(lambda: load(model).running == 0)
    assert load(model).speculation.rounds - before < 800
    built.stopping.include_stop = True
    assert generation.Generate(built).choices[0].text == text[:43]


def test_stop_tokens_end_the_answer(generation, plain):
    (whole,) = plain.generate([plain.tokenizer.encode("Hello")], SamplingParams(temperature=0, max_tokens=24))
    stop = whole.tokens[9]
    end = whole.tokens.index(stop)
    built = request(stopping__stop_token_ids=[stop])
    choice = generation.Generate(built).choices[0]
    assert list(choice.token_ids) == whole.tokens[: end + 1]
    assert choice.text == plain.tokenizer.decode(whole.tokens[:end])
    assert (choice.ending.reason, choice.ending.stop_token_id) == (pb.FINISH_REASON_STOP, stop)
    built.stopping.include_stop = True
    assert generation.Generate(built).choices[0].text == plain.tokenizer.decode(whole.tokens[: end + 1])


def test_only_what_is_asked_for_is_sent(generation):
    whole = generation.Generate(request()).choices[0]
    ids_only = generation.Generate(request(output__text=False)).choices[0]
    assert (ids_only.text, ids_only.token_ids) == ("", whole.token_ids)
    text_only = generation.Generate(request(output__token_ids=False)).choices[0]
    assert (text_only.text, list(text_only.token_ids)) == (whole.text, [])


def test_many_at_once_each_get_their_own(generation, plain):
    """More requests than slots, good ones among bad ones."""
    prompts = [plain.tokenizer.encode(text) for text in ("One", "Two", "Three", "Four", "Five", "Six")]
    expected = plain.generate(prompts, SamplingParams(temperature=0, max_tokens=24))

    def ask(prompt):
        return streamed(generation, request(prompt))[0]

    def fail():
        with pytest.raises(grpc.RpcError) as raised:
            generation.Generate(request([258]))
        return raised.value.code()

    with ThreadPoolExecutor(12) as threads:
        bad = [threads.submit(fail) for _ in range(4)]
        good = [threads.submit(ask, prompt) for prompt in prompts]
        assert [future.result() for future in good] == [one.tokens for one in expected]
        assert {future.result() for future in bad} == {grpc.StatusCode.INVALID_ARGUMENT}


def test_an_answer_that_its_grammar_leaves_no_token_fails(generation):
    stuck = request(structured_output__regex="yes", stopping__min_tokens=9)
    events = generation.GenerateStream(pb.GenerateStreamRequest(request=stuck))
    with pytest.raises(grpc.RpcError) as raised:
        list(events)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert raised.value.details().startswith("structured_output: found an answer that can neither go on nor end here")


def test_min_tokens_may_be_many_where_max_tokens_is_unset_and_hold_for_stop_strings(generation):
    call = begun(generation, request(stopping__min_tokens=300, max_tokens=None))
    call.cancel()
    text = generation.Generate(request()).choices[0].text
    stops = [text[3:5], text[10:12]]
    early = generation.Generate(request(stopping__stop=stops)).choices[0]
    late = generation.Generate(request(stopping__stop=stops, stopping__min_tokens=20)).choices[0]
    assert len(early.token_ids) < 20 < len(late.token_ids)


def test_a_client_without_the_protos_calls_by_reflection(channel, generation):
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("jaxspec.v1.GenerationService").FindMethodByName("Generate")
    make = message_factory.GetMessageClass
    call = channel.unary_unary(
        "/jaxspec.v1.GenerationService/Generate",
        request_serializer=make(method.input_type).SerializeToString,
        response_deserializer=make(method.output_type).FromString,
    )
    built = json_format.Parse(
        '{"text": "Hello", "sampling": {"temperature": 0}, "stopping": {"maxTokens": 5}}', make(method.input_type)()
    )
    assert call(built).choices[0].text == generation.Generate(request(max_tokens=5)).choices[0].text


# Leaving early


def test_cancelling_frees_the_slots(generation, model):
    before = load(model).speculation.rounds
    calls = [begun(generation, request(max_tokens=900)) for _ in range(SLOTS)]
    for call in calls:
        call.cancel()
    wait_until(lambda: load(model).running == 0)
    assert load(model).cache_pages_used == 0
    assert load(model).speculation.rounds - before < 900 * SLOTS


def test_a_deadline_frees_the_slot(generation, model):
    with pytest.raises(grpc.RpcError) as raised:
        streamed(generation, request(max_tokens=900), timeout=0.2)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: load(model).running == load(model).waiting == 0)


def test_a_full_queue_refuses_with_a_hint(generation, model, admin):
    calls = [begun(generation, request(max_tokens=900)) for _ in range(SLOTS)]
    waiting = generation.GenerateStream(
        pb.GenerateStreamRequest(request=request(sampling={"choices": QUEUE, **GREEDY}, max_tokens=900))
    )
    assert next(waiting).HasField("accepted")
    wait_until(lambda: load(model).waiting == QUEUE)
    with pytest.raises(grpc.RpcError) as raised:
        generation.Generate(request())
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "expected at most 10; try again later" in raised.value.details()
    (detail,) = rpc_status.from_call(raised.value).details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.seconds == 1
    assert len(admin.Abort(admin_pb2.AbortRequest(all=True)).aborted) == SLOTS + 1
    for call in (*calls, waiting):
        assert list(call)[-1].finished.ending.reason == pb.FINISH_REASON_CANCELLED
    assert list(generation.Generate(request(max_tokens=3)).choices[0].token_ids)
