"""The unmodified `smg` gateway in front of `jaxspec serve --dialect vllm`, and the `openai` client in front of that.

Runs in an environment of its own (`make test-gateway`): JAXSPEC_PYTHON names the interpreter that has jaxspec.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180
PROMPT = "ab" * 20


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(condition, what):
    until = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, what()
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Ports of the dialect and of the metrics of a server of tiny models."""
    folder = tmp_path_factory.mktemp("server")
    command = [os.environ["JAXSPEC_PYTHON"], "-m", "tests.gateway.serve_tiny", folder, "--port", "0", "--slots", "2"]
    command += ["--dialect", "vllm", "--dialect-port", "0", "--metrics-port", "0", "--served-model-name", "tiny"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla-tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen([str(word) for word in command], stderr=file, cwd=ROOT, env=environment)
    try:
        wait_for(lambda: process.poll() is not None or " s  serving\n" in log.read_text(), log.read_text)
        assert process.poll() is None, log.read_text()
        text = log.read_text()
        yield int(re.search(r"vllm on port (\d+)", text)[1]), int(re.search(r":(\d+)/metrics", text)[1])
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("gateway") / "log"
    command = [Path(sys.executable).parent / "smg", "launch", "--host", "127.0.0.1", "--port", port]
    command += ["--worker-urls", f"grpc://127.0.0.1:{server[0]}"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
    with log.open("w") as file:
        process = subprocess.Popen([str(word) for word in command], stdout=file, stderr=file)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)

    def answers():
        """It knows the model before it has its tokenizer."""
        with contextlib.suppress(openai.OpenAIError):
            return [model.id for model in client.models.list()] == ["tiny"] and complete(client, max_tokens=1)

    try:
        wait_for(answers, log.read_text)
        yield client
    finally:
        process.kill()
        process.wait(30)


def metric(server, name):
    text = urllib.request.urlopen(f"http://127.0.0.1:{server[1]}/metrics", timeout=10).read().decode()
    return float(re.search(rf"^jaxspec_{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])


def complete(client, **options):
    return client.completions.create(
        **({"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0} | options)
    )


def chat(client, **options):
    messages = [{"role": "user", "content": "Hello"}]
    return client.chat.completions.create(
        **({"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0} | options)
    )


def test_completions_tell_what_speculation_did(client, server):
    before = [metric(server, f"spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")]
    answer = complete(client)
    accepted, drafted = (
        metric(server, f"spec_decode_num_{name}_tokens_total") - value
        for name, value in zip(("accepted", "draft"), before, strict=True)
    )
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (40, 60)
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == accepted > 0
    assert details.rejected_prediction_tokens == drafted - accepted


def test_a_chat_and_its_stream_agree(client):
    whole = chat(client)
    parts = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert len(parts) > 5
    assert parts[-1].usage == whole.usage
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"


def test_seeds_repeat(client):
    first, again, other = (
        chat(client, temperature=1, top_p=0.9, seed=seed).choices[0].message.content for seed in (3, 3, 4)
    )
    assert first == again != other


def test_stop_strings(client):
    whole = complete(client).choices[0].text
    stop = whole[9:12]
    answer = complete(client, stop=[stop], max_tokens=900)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 60


def test_a_json_schema_is_kept_to(client):
    schema = {
        "type": "object",
        "properties": {"well": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["well", "size"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = chat(client, response_format=wanted, temperature=1, seed=seed, max_tokens=300)
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"well", "size"}
        assert isinstance(found["well"], bool)
        assert found["size"] in ("small", "large")
        assert answer.choices[0].finish_reason == "stop"


def test_bad_input_is_the_clients_fault(client):
    with pytest.raises(openai.BadRequestError, match="stopping.max_tokens: found 100000"):
        chat(client, max_tokens=100_000)


def test_a_client_that_leaves_frees_its_slot(client, server):
    before = metric(server, "generation_tokens_total")
    stream = complete(client, max_tokens=900, stream=True)
    next(iter(stream))
    assert metric(server, "num_requests_running") == 1
    stream.close()
    wait_for(lambda: metric(server, "num_requests_running") == 0, lambda: "it still runs")
    assert metric(server, "generation_tokens_total") - before < 900
