"""`jaxspec serve` from its command line to its exit code: start-up, metrics, logs, profiles, signals."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from jaxspec.v1 import generation_pb2 as pb
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(folders, profiles):
    target, drafter = folders
    server = ServerProcess(
        *("--target", target, "--drafter", drafter, "--served-model-name", "tiny", "--budget", 6, "--slots", 1),
        *("--metrics-port", 0, "--metrics-compat", "vllm", "--log-format", "json", "--profile-dir", profiles),
        *("--max-message-bytes", 4096),
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


def test_start_up_is_told(server):
    text = "\n".join(server.lines)
    stages = ["listening on", "loading target", "loading drafter", "compiled decode 1 slot(s)", "gRPC", "  serving"]
    assert [text.index(stage) for stage in stages] == sorted(text.index(stage) for stage in stages)
    assert "WARNING" not in text


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
