"""`jaxspec serve` from its command line to its exit code: start-up, metrics, logs, profiles, signals."""

import hashlib
import io
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from jaxspec.v1 import generation_pb2 as pb
from tests.support.server_process import ServerProcess, tiny_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(folders, profiles):
    target, drafter = folders
    server = ServerProcess(
        *("--target", target, "--drafter", drafter, "--served-model-name", "tiny", "--budget", 6, "--slots", 1),
        *("--metrics-port", 0, "--metrics-compat", "vllm", "--log-format", "json", "--profile-dir", profiles),
        *("--max-message-bytes", 4096, "--dialect", "vllm", "--dialect-port", 0),
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def request(max_tokens=24, **fields):
    return pb.GenerateRequest(
        text="ab" * 20,
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_tokens=max_tokens),
        **fields,
    )


def scrape(server):
    """Value by (sample name, its labels but the model's)."""
    address = server.wait_for(r"(http://\S+/metrics)").group(1)
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    named = [sample for sample in samples if sample.name.startswith(("jaxspec_", "vllm:"))]
    assert {sample.labels.pop("model_name") for sample in named} == {"tiny"}
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def test_metrics_are_what_the_answers_say(server, channel):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    answers = [stub.Generate(request(max_tokens)) for max_tokens in (24, 120)]
    with pytest.raises(grpc.RpcError):
        stub.Generate(request(0))
    statistics = [answer.choices[0].ending.speculation for answer in answers]
    rounds = sum(one.rounds for one in statistics)
    accepted = sum(one.accepted_draft_tokens for one in statistics)
    found = scrape(server)
    assert accepted > 0
    for name, labels, value in [
        ("prompt_tokens_total", (), 80),
        ("generation_tokens_total", (), 144),
        ("request_success_total", (("finished_reason", "length"),), 2),
        ("spec_decode_num_drafts_total", (), rounds),
        ("spec_decode_num_draft_tokens_total", (), 6 * rounds),
        ("spec_decode_num_accepted_tokens_total", (), accepted),
        ("time_to_first_token_seconds_count", (), 2),
        ("e2e_request_latency_seconds_count", (), 2),
        ("time_per_output_token_seconds_count", (), 2),
        ("request_queue_time_seconds_count", (), 2),
        ("num_requests_running", (), 0),
        ("num_requests_waiting", (), 0),
        ("kv_cache_usage_perc", (), 0),
    ]:
        assert found[f"jaxspec_{name}", labels] == value, name
        assert found[f"vllm:{name}", labels] == value, name
    per_position = [
        found.get(("vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(place)),)), 0)
        for place in range(3)
    ]
    assert sum(per_position) == accepted
    assert per_position[0] == sum(sum(one.acceptance_histogram[1:]) for one in statistics)
    call = (("grpc_method", "Generate"), ("grpc_service", "jaxspec.v1.GenerationService"))
    assert found["grpc_server_started_total", call] == 3
    assert found["grpc_server_handled_total", (("grpc_code", "OK"), *call)] == 2
    assert found["grpc_server_handled_total", (("grpc_code", "INVALID_ARGUMENT"), *call)] == 1
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_the_log_names_requests(server, channel):
    generation_pb2_grpc.GenerationServiceStub(channel).Generate(request(request_id="find-me"))
    event = json.loads(server.wait_for(r'^\{.*"find-me".*\}$').group())
    assert (event["event"], event["level"]) == ("answered", "INFO")
    assert (event["prompt_tokens"], event["completion_tokens"], event["endings"]) == (40, 24, "length")
    assert event["seconds"] >= event["seconds_to_first_token"] > 0
    assert event["peer"].startswith("ipv4:127.0.0.1:")


def test_large_messages_are_refused(channel):
    with pytest.raises(grpc.RpcError) as raised:
        generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="x" * 5000))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4096" in raised.value.details()


@pytest.fixture(scope="module")
def gateway(server):
    """A stub of what a gateway speaks."""
    port = server.wait_for(r"listening on .* vllm on port (\d+)").group(1)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def gateway_request(ids, max_tokens=24, **fields):
    sampling = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, **fields)
    return vllm_engine_pb2.GenerateRequest(
        request_id=f"g-{time.monotonic_ns()}",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=ids),
        sampling_params=sampling,
    )


def test_a_gateway_gets_the_same_answer(channel, gateway):
    ids = model_pb2_grpc.ModelServiceStub(channel).Tokenize(model_pb2.TokenizeRequest(text="ab" * 20)).token_ids
    expected = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request()).choices[0]
    asked = gateway_request(ids)
    (whole,) = gateway.Generate(asked)
    assert list(whole.complete.output_ids) == list(expected.token_ids)
    assert (whole.complete.finish_reason, whole.complete.prompt_tokens, whole.complete.completion_tokens) == (
        "length",
        40,
        24,
    )
    statistics = expected.ending.speculation
    assert whole.complete.spec_accepted_tokens == statistics.accepted_draft_tokens
    assert whole.complete.spec_draft_tokens == statistics.draft_tokens
    asked.stream = True
    *chunks, last = gateway.Generate(asked)
    assert [token for part in chunks for token in part.chunk.token_ids] == list(expected.token_ids)
    assert len(chunks) > 5
    assert chunks[-1].chunk.completion_tokens == 24
    assert last == whole


def test_a_gateway_learns_what_it_asks_at_start(gateway, folders):
    assert gateway.HealthCheck(vllm_engine_pb2.HealthCheckRequest()).healthy
    info = gateway.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.served_model_name, info.vocab_size, info.is_generation) == ("tiny", 258, True)
    assert gateway.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest()).max_num_seqs == 1
    (rank,) = gateway.GetLoads(vllm_engine_pb2.GetLoadsRequest()).loads
    assert (rank.num_running_reqs, rank.max_running_requests) == (0, 1)
    parts = list(gateway.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(archive.namelist())
    assert archive.read("tokenizer.json") == (folders[0] / "tokenizer" / "tokenizer.json").read_bytes()


def test_a_gateway_aborts_by_id(gateway):
    asked = gateway_request([1, 2], 900)
    asked.stream = True
    call = gateway.Generate(asked)
    next(call)
    gateway.Abort(vllm_engine_pb2.AbortRequest(request_ids=[asked.request_id, "unknown"]))
    *_, last = call
    assert last.complete.finish_reason == "abort"
    assert last.complete.completion_tokens < 900


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
def test_a_gateway_is_told_what_is_not_for_it(gateway, name, message):
    with pytest.raises(grpc.RpcError) as raised:
        list(getattr(gateway, name)(message))
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details().startswith(f"{name}: ")


def chat(server, lines, *options):
    """Runs `jaxspec chat` on lines of input."""
    command = [sys.executable, "-m", "jaxspec", "chat", "--address", server.address, *map(str, options)]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_chat_goes_on(server, channel):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)

    def answer(*turns):
        messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
        built = pb.GenerateRequest(
            conversation=pb.Conversation(messages=messages),
            sampling=pb.SamplingOptions(temperature=0),
            stopping=pb.StoppingOptions(max_tokens=12),
        )
        return stub.Generate(built).choices[0].text

    start = [("system", "Be"), ("user", "Hello")]
    first = answer(*start)
    second = answer(*start, ("assistant", first), ("user", "Go on"))
    options = ("--system", "Be", "--temperature", 0, "--max-tokens", 12)
    code, out, err = chat(server, ["Hello", "Go on", "", "/reset", "Hello", "/exit", "never"], *options)
    assert (code, out) == (0, f"{first}\n{second}\n{first}\n")
    assert err.count("12 tokens, ") == 3
    assert "τ 1." in err


def test_a_chat_goes_on_after_words_that_are_too_long(server):
    options = ("--temperature", 0, "--max-tokens", 5)
    code, out, err = chat(server, ["Hello " * 300, "Hello " * 1000, "Hello"], *options)
    assert code == 0, err
    assert "error: conversation: found " in err
    assert "(INVALID_ARGUMENT)" in err
    assert "larger than max" in err
    assert out == chat(server, ["Hello"], *options)[1]


@pytest.mark.parametrize(
    ("load", "name", "levels"),
    [(["--concurrency", "1,2"], "requests at once", [1, 2]), (["--rate", "50"], "requests/s", [50])],
)
def test_a_load_test_reports(server, tmp_path, load, name, levels):
    command = [sys.executable, "-m", "jaxspec", "bench", "serve", "--address", server.address, *load]
    command += ["--requests", "4", "--max-tokens", "10", "--json", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (report["load"], [level["load"] for level in report["levels"]]) == (name, levels)
    for level in report["levels"]:
        assert (level["answered"], level["tokens"], level["errors"]) == (4, 40, {})
        assert level["request_latency"]["p50"] >= level["time_to_first_token"]["p50"] > 0
    assert report["model"]["name"] == "tiny"
    assert (tmp_path / "plot.png").is_file()


def test_profiles_are_written(channel, profiles):
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    folder = admin.StartProfile(admin_pb2.StartProfileRequest()).folder
    assert folder.startswith(str(profiles))
    with pytest.raises(grpc.RpcError) as raised:
        admin.StartProfile(admin_pb2.StartProfileRequest())
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    generation_pb2_grpc.GenerationServiceStub(channel).Generate(request())
    admin.StopProfile(admin_pb2.StopProfileRequest())
    assert list(profiles.rglob("*.xplane.pb"))


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec", "serve", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def test_a_port_in_use_is_told_at_once(folders):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = command("--target", folders[0], "--port", port)
    assert code == 2
    assert f"error: --host, --port: found 127.0.0.1:{port}, which can't be listened on; in use?" in err
    assert "Traceback" not in err


def test_models_that_do_not_load_are_told_in_one_line(folders):
    code, err = command("--target", folders[0], "--drafter", folders[0], "--port", 0)
    assert code == 2
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        f"error: {folders[0]}: found a target (llama), expected a drafter"
    ]
    assert "Traceback" not in err


def test_sigterm_ends_what_runs_then_the_process(server, channel):
    """The last test of this server."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    call = stub.GenerateStream(pb.GenerateStreamRequest(request=request(900)))
    assert next(call).HasField("accepted")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining: 1 request")
    state = model_pb2_grpc.ModelServiceStub(channel).GetServerInfo(model_pb2.GetServerInfoRequest()).state
    assert state == model_pb2.SERVER_STATE_DRAINING
    with pytest.raises(grpc.RpcError) as raised:
        stub.Generate(request())
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    *_, last = call
    assert last.finished.usage.completion_tokens == 900
    assert server.process.wait(60) == 0
    server.wait_for("stopped")


def test_sigterm_while_loading_ends_at_once(folders):
    server = ServerProcess("--target", folders[0], serving=False)
    began = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - began < 15
    server.close()
    assert not any("serving" in line and "not serving" not in line for line in server.lines)
