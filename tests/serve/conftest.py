"""A real server process that serves the tiny models, and the target alone to compare with."""

import grpc
import pytest

from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.v1 import admin_pb2_grpc, generation_pb2_grpc, model_pb2_grpc
from tests.support.server_process import QUEUE, SLOTS, ServerProcess, tiny_models


@pytest.fixture(scope="package")
def folders(tmp_path_factory):
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def server(folders):
    target, drafter = folders
    server = ServerProcess(
        *("--target", target, "--drafter", drafter, "--served-model-name", "tiny"),
        *("--budget", 6, "--slots", SLOTS, "--queue", QUEUE),
        *("--dialect", "vllm", "--dialect-port", 0),
    )
    yield server
    server.close()


@pytest.fixture(scope="package")
def channel(server):
    with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", 1 << 26)]) as channel:
        yield channel


@pytest.fixture(scope="package")
def generation(channel):
    return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="package")
def model(channel):
    return model_pb2_grpc.ModelServiceStub(channel)


@pytest.fixture(scope="package")
def admin(channel):
    return admin_pb2_grpc.AdminServiceStub(channel)


@pytest.fixture(scope="package")
def plain(folders):
    """The target alone: what every answer must equal."""
    return Engine.from_checkpoints(folders[0], config=EngineConfig(slots=1, max_context=256))
