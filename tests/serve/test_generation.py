"""GenerationService and ModelService of a real server process, over loopback, against the engine used directly."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.grammar import Grammar
from jaxspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from jaxspec.v1 import generation_pb2 as pb
from tests.support.server_process import CONTEXT, ServerProcess, tiny_models

SLOTS, QUEUE = 2, 8
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(folders):
    target, drafter = folders
    server = ServerProcess(
        *("--target", target, "--drafter", drafter, "--served-model-name", "tiny"),
        *("--budget", 6, "--slots", SLOTS, "--queue", QUEUE),
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", 1 << 26)]) as channel:
        yield channel


@pytest.fixture(scope="module")
def generation(channel):
    return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def model(channel):
    return model_pb2_grpc.ModelServiceStub(channel)


@pytest.fixture(scope="module")
def admin(channel):
    return admin_pb2_grpc.AdminServiceStub(channel)


@pytest.fixture(scope="module")
def plain(folders):
    """The target alone: what every answer must equal."""
    return Engine.from_checkpoints(folders[0], config=EngineConfig(slots=1, max_context=256))


def request(prompt="Hello", sampling=GREEDY, max_tokens=24, **fields):
    """A request; fields as in `stopping__stop`."""
    built = pb.GenerateRequest(sampling=pb.SamplingOptions(**sampling))
    if isinstance(prompt, str):
        built.text = prompt
    elif prompt is not None:
        built.token_ids.ids.extend(prompt)
    if max_tokens is not None:
        built.stopping.max_tokens = max_tokens
    json_format.ParseDict(nested(fields), built)
    return built


def nested(fields):
    tree = {}
    for name, value in fields.items():
        *path, last = name.split("__")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def streamed(generation, built, **options):
    """Tokens, text and the finished event of a request of one choice, and every event."""
    events = list(generation.GenerateStream(pb.GenerateStreamRequest(request=built), **options))
    deltas = [event.delta for event in events if event.HasField("delta")]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(delta.text for delta in deltas), events[-1].finished, events


def wait_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


def load(model):
    return model.GetLoad(model_pb2.GetLoadRequest())


# Answers


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


def test_conversations_are_rendered_by_the_template(generation, model, plain):
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi </s>", "mark": "!"}]
    expected = plain.tokenizer.encode_chat(messages, tail="?")
    conversation = pb.Conversation(
        messages=[
            pb.ChatMessage(role="system", content="Be"),
            pb.ChatMessage(role="user", content="Hi </s>", fields_json=json.dumps({"mark": "!"})),
        ],
        variables_json=json.dumps({"tail": "?"}),
    )
    ids = list(model.Tokenize(model_pb2.TokenizeRequest(conversation=conversation)).token_ids)
    assert ids == expected
    assert expected.count(257) == 0  # what a message spells out ends no turn
    assert model.Detokenize(model_pb2.DetokenizeRequest(token_ids=ids)).text == "s:Beu:Hi </s>!?"
    built = request(None)
    built.conversation.CopyFrom(conversation)
    answer = generation.Generate(built)
    assert answer.usage.prompt_tokens == len(expected)
    assert answer.choices == generation.Generate(request(expected)).choices


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


# Leaving early


def begun(generation, built, **options):
    """A stream that has brought its first tokens."""
    call = generation.GenerateStream(pb.GenerateStreamRequest(request=built), **options)
    while not next(call).HasField("delta"):
        pass
    return call


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


def test_abort_ends_a_stream_with_what_it_has(generation, admin):
    call = begun(generation, request(max_tokens=900, request_id="a/b-1"))
    with pytest.raises(grpc.RpcError) as raised:
        generation.Generate(request(request_id="a/b-1"))
    assert raised.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "request_id: found a/b-1" in raised.value.details()
    response = admin.Abort(admin_pb2.AbortRequest(request_ids=["a/b-1", "other"]))
    assert (list(response.aborted), list(response.unknown)) == (["a/b-1"], ["other"])
    *_, last = call
    assert last.finished.ending.reason == pb.FINISH_REASON_CANCELLED
    assert 0 < last.finished.usage.completion_tokens < 900
    assert generation.Generate(request(request_id="a/b-1", max_tokens=1)).request_id == "a/b-1"


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


# Bad input

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("built", "code", "field", "message"),
    [
        (request(None), INVALID, "prompt", "found none, expected one of text, token_ids, conversation"),
        (request([]), INVALID, "token_ids", "found 0 tokens, expected at least 1"),
        (request(""), INVALID, "text", "found 0 tokens, expected at least 1"),
        (request([258]), INVALID, "token_ids", "found token id 258, expected 0 to 257"),
        (request([-1]), INVALID, "token_ids", "found token id -1, expected 0 to 257"),
        (request([1] * CONTEXT), INVALID, "token_ids", "found 1024 tokens, expected at most 1023 (context limit)"),
        (request("x" * CONTEXT), INVALID, "text", "found 1024 tokens, expected at most 1023 (context limit)"),
        (request("x" * 10_000_000), INVALID, "text", "found 10000000 bytes, expected at most 4092"),
        (request(max_tokens=0), INVALID, "stopping.max_tokens", "found 0, expected 1 to"),
        (
            request(max_tokens=1020),
            INVALID,
            "stopping.max_tokens",
            "found 1020, expected at most 1019 (context of 1024",
        ),
        (request(sampling={"temperature": -1}), INVALID, "sampling.temperature", "found -1.0, expected 0.0 to 100.0"),
        (request(sampling={"temperature": float("nan")}), INVALID, "sampling.temperature", "found nan"),
        (request(sampling={"temperature": float("inf")}), INVALID, "sampling.temperature", "found inf"),
        (request(sampling={"top_k": -1}), INVALID, "sampling.top_k", "found -1, expected 0 to"),
        (request(sampling={"top_p": 0}), INVALID, "sampling.top_p", "found 0.0, expected 1e-06 to 1.0"),
        (request(sampling={"min_p": 2}), INVALID, "sampling.min_p", "found 2.0, expected 0.0 to 1.0"),
        (request(sampling={"choices": 0}), INVALID, "sampling.choices", "found 0, expected 1 to 10"),
        (request(sampling={"choices": 11}), INVALID, "sampling.choices", "found 11, expected 1 to 10"),
        (request(stopping__stop=[""]), INVALID, "stopping.stop", "found 0 characters, expected 1 to 256 in each"),
        (request(stopping__stop=["x" * 257]), INVALID, "stopping.stop", "found 257 characters"),
        (request(stopping__stop=["x"] * 5000), INVALID, "stopping.stop", "found 5000 strings, expected at most 16"),
        (request(stopping__stop_token_ids=[258]), INVALID, "stopping.stop_token_ids", "found token id 258"),
        (
            request(stopping__stop_token_ids=[*range(99)]),
            INVALID,
            "stopping.stop_token_ids",
            "found 100 with the model's",
        ),
        (request(request_id="a b"), INVALID, "request_id", "found 'a b', expected 1 to 128 characters"),
        (request(request_id="x\ny"), INVALID, "request_id", r"found 'x\ny'"),
        (request(request_id="x" * 129), INVALID, "request_id", "expected 1 to 128 characters"),
        (request(output__text=False, output__token_ids=False), INVALID, "output", "found neither text nor token_ids"),
        (request(model="other"), grpc.StatusCode.NOT_FOUND, "model", "found 'other', expected 'tiny'"),
        (
            request(sampling={"repetition_penalty": 0}),
            INVALID,
            "sampling.repetition_penalty",
            "found 0.0, expected 0.01",
        ),
        (
            request(sampling={"presence_penalty": 3}),
            INVALID,
            "sampling.presence_penalty",
            "found 3.0, expected -2.0 to",
        ),
        (request(sampling={"logit_bias": {1: 101}}), INVALID, "sampling.logit_bias", "(1, 101.0)"),
        (request(sampling={"logit_bias": {999: 1}}), INVALID, "sampling.logit_bias", "token id 999, expected 0 to 257"),
        (
            request(sampling={"logit_bias": dict.fromkeys(range(301), 1)}),
            INVALID,
            "sampling.logit_bias",
            "found 301 tokens, expected at most 300",
        ),
        (request(max_tokens=None, stopping__min_tokens=1020), INVALID, "stopping.min_tokens", "expected 0 to 1019"),
        (request(stopping__min_tokens=25), INVALID, "stopping.min_tokens", "found 25, expected 0 to 24"),
        (request(output__logprobs=21), INVALID, "output.logprobs", "found 21, expected 0 to 20"),
        (request(output__prompt_logprobs=-1), INVALID, "output.prompt_logprobs", "found -1, expected 0 to 20"),
        (request(structured_output__regex="a("), INVALID, "structured_output", "invalid regex"),
        (request(structured_output__json_schema="{"), INVALID, "structured_output", "at line 1"),
        (request(structured_output__json_schema='{"enum": []}'), INVALID, "structured_output", "Unsatisfiable"),
        (request(structured_output__regex=r"[^\s\S]"), INVALID, "structured_output", "no answer can meet"),
        (request(structured_output__regex="(" * 20_000), INVALID, "structured_output", "(((( … (((("),
        (request(structured_output__grammar="start: x"), INVALID, "structured_output", "x"),
        (
            request(structured_output__regex="a" * 300_000),
            INVALID,
            "structured_output.regex",
            "found 300000 characters, expected 1 to 65536",
        ),
        (
            request(structured_output__regex="a", stopping__ignore_eos=True),
            INVALID,
            "stopping.ignore_eos",
            "found True, expected False",
        ),
        (request(speculation__budget=7), INVALID, "speculation.budget", "found 7, expected at most the engine's 6"),
        (
            request(speculation__enabled=False, speculation__budget=2),
            INVALID,
            "speculation.budget",
            "found 2, expected 0",
        ),
        (
            request(None, conversation__messages=[{"role": "u", "content": "", "fields_json": "["}]),
            INVALID,
            "conversation.messages[0].fields_json",
            "found no JSON",
        ),
        (
            request(None, conversation__variables_json="[" * 3000),
            INVALID,
            "conversation.variables_json",
            "found no JSON",
        ),
        (
            request(None, conversation__variables_json='{"messages": 1}'),
            INVALID,
            "conversation.variables_json",
            "found the name messages",
        ),
        (
            request(None, conversation__variables_json='{"self": 1}'),
            INVALID,
            "conversation.variables_json",
            "found the name self",
        ),
        (
            request(None, conversation__messages=[{}] * 20_000),
            INVALID,
            "conversation.messages",
            "found 20000, expected at most 16384",
        ),
        (request(None, conversation__variables_json="7"), INVALID, "conversation.variables_json", "found int"),
    ],
)
def test_bad_input_names_field_and_limit(generation, built, code, field, message):
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        generation.Generate(built, timeout=20)
    assert time.monotonic() - began < 10
    assert raised.value.code() == code
    assert raised.value.details().startswith(f"{field}: ")
    assert message in raised.value.details()
    violation = error_details_pb2.BadRequest()
    (detail,) = rpc_status.from_call(raised.value).details
    assert detail.Unpack(violation)
    assert violation.field_violations[0].field == field
    with pytest.raises(grpc.RpcError) as raised:
        list(generation.GenerateStream(pb.GenerateStreamRequest(request=built)))
    assert raised.value.code() == code


def test_the_message_of_a_very_long_value_still_arrives(generation, admin):
    for call in (
        lambda: generation.Generate(request(model="\N{SAILBOAT}" * 100_000)),
        lambda: admin.Abort(admin_pb2.AbortRequest(request_ids=["x" * 100_000])),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        assert ": found '" in raised.value.details()
        assert ", expected " in raised.value.details()


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


@pytest.mark.parametrize("depth", [900, 1500])
def test_deeply_nested_values_are_refused(generation, depth):
    """Where is up to Python: in the JSON, in the template or in the prompt that it makes."""
    nest = '{"tail": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(grpc.RpcError) as raised:
        generation.Generate(request(None, conversation__variables_json=nest), timeout=20)
    assert raised.value.code() == INVALID
    assert raised.value.details().startswith("conversation")


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"\xff\xff\xff\xff", INVALID, "request: not readable"),
        (b"\x1a\x02\xff\xfe", INVALID, "request: not readable"),  # text that is no UTF-8
        (b"\xf8\x07\x01", UNIMPLEMENTED, "request: found field number 127, which this server does not know"),
        (b"\x32\x03\xf8\x07\x01", UNIMPLEMENTED, "sampling: found field number 127"),
        (b"\x1a" + b"\x80" * 9 + b"\x01", INVALID, "request: not readable"),
        (b"x" * (17 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
def test_malformed_messages(channel, data, code, message):
    call = channel.unary_unary("/jaxspec.v1.GenerationService/Generate")
    with pytest.raises(grpc.RpcError) as raised:
        call(data, timeout=20)
    assert raised.value.code() == code
    assert message in raised.value.details()


@pytest.mark.parametrize("method", ["GenerationService/GenerateStream", "ModelService/Tokenize", "AdminService/Drain"])
def test_no_call_ignores_a_field(channel, method):
    call = channel.unary_stream(f"/jaxspec.v1.{method}")
    with pytest.raises(grpc.RpcError) as raised:
        list(call(b"\xf8\x07\x01", timeout=20))
    assert raised.value.code() == UNIMPLEMENTED
    assert raised.value.details().startswith("request: found field number 127")


def test_admin_calls_name_what_is_wrong(admin):
    for call, argument, code, message in [
        (admin.Abort, admin_pb2.AbortRequest(), INVALID, "request_ids: found none"),
        (admin.Abort, admin_pb2.AbortRequest(all=True, request_ids=["x"]), INVALID, "request_ids: found 1 with all"),
        (admin.Abort, admin_pb2.AbortRequest(request_ids=["x"]), grpc.StatusCode.NOT_FOUND, "request_ids: found 'x'"),
        (admin.Drain, admin_pb2.DrainRequest(timeout_seconds=-1), INVALID, "timeout_seconds: found -1.0"),
        (admin.StartProfile, admin_pb2.StartProfileRequest(), grpc.StatusCode.FAILED_PRECONDITION, "--profile-dir"),
        (admin.StopProfile, admin_pb2.StopProfileRequest(), grpc.StatusCode.FAILED_PRECONDITION, "no trace running"),
    ]:
        with pytest.raises(grpc.RpcError) as raised:
            call(argument)
        assert raised.value.code() == code
        assert message in raised.value.details()


# What is served


def test_the_server_says_what_it_is(model):
    info = model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert (info.name, info.family, info.vocab_size, info.max_context) == ("tiny", "llama", 258, CONTEXT)
    assert (info.dtype, info.has_chat_template, list(info.eos_token_ids)) == ("float32", True, [257])
    assert (info.speculation.budget, info.speculation.top_k_cap, info.speculation.draft_length) == (6, 16, 3)
    assert "sampling.top_p" in info.supported_fields
    assert {"speculation.enabled", "speculation.budget"} <= set(info.supported_fields)
    server = model.GetServerInfo(model_pb2.GetServerInfoRequest())
    assert (server.devices, server.device_kind, server.slots, server.queue) == (1, "cpu", SLOTS, QUEUE)
    assert server.state == model_pb2.SERVER_STATE_SERVING
    assert server.uptime_seconds > 0


@pytest.mark.parametrize("index", [-1, 258])
def test_detokenize_refuses_ids_beyond_the_vocabulary(model, index):
    with pytest.raises(grpc.RpcError) as raised:
        model.Detokenize(model_pb2.DetokenizeRequest(token_ids=[index]))
    assert raised.value.code() == INVALID
    assert f"token_ids: found {index}, expected 0 to 257" in raised.value.details()


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


def test_start_up_is_told(server):
    text = "\n".join(server.lines)
    stages = ["listening on", "loading target", "loading drafter", "compiled decode 1 slot(s)", "gRPC", "  serving"]
    assert [text.index(stage) for stage in stages] == sorted(text.index(stage) for stage in stages)
    assert "WARNING" not in text
