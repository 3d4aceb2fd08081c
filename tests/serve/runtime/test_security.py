"""Who may call: TLS, mutual TLS, tokens, operators' calls."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
import trustme
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.serve.runtime.refusal import Refusal
from jaxspec.serve.runtime.security import Security, is_loopback, is_loopback_peer, read_token
from jaxspec.serve.runtime.server_config import ServerConfig
from jaxspec.v1 import admin_pb2, admin_pb2_grpc, model_pb2, model_pb2_grpc
from tests.support.published import write_byte_tokenizer
from tests.support.scripted_engine import ScriptedEngine, serving

TOKEN, ADMIN_TOKEN = "t" * 16, "a" * 16
BOTH = Security(token=TOKEN, admin_token=ADMIN_TOKEN)
LOAD, ABORT = "/jaxspec.v1.ModelService/GetLoad", "/jaxspec.v1.AdminService/Abort"
LOOPBACK, ELSEWHERE = "ipv4:127.0.0.1:5000", "ipv4:10.0.0.7:5000"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, {"eos_token": "</s>"})
    return Tokenizer.from_checkpoint(folder)


def refusal(security, method, peer=LOOPBACK, authorization=None):
    """The code that a call is refused with, or None."""
    metadata = () if authorization is None else (("authorization", authorization),)
    context = SimpleNamespace(invocation_metadata=lambda: metadata, peer=lambda: peer)
    try:
        security.check(method, context)
    except Refusal as refused:
        return refused.code
    return None


@pytest.mark.parametrize(
    ("security", "method", "peer", "authorization", "code"),
    [
        (Security(), LOAD, ELSEWHERE, None, None),
        (Security(), ABORT, LOOPBACK, None, None),
        (Security(), ABORT, "ipv6:%5B::1%5D:5000", None, None),
        (Security(), ABORT, "unix:/run/x", None, None),
        (Security(), ABORT, ELSEWHERE, None, StatusCode.PERMISSION_DENIED),
        (Security(), ABORT, "ipv6:%5Bfe80::1%5D:5000", None, StatusCode.PERMISSION_DENIED),
        (Security(token=TOKEN), LOAD, LOOPBACK, None, StatusCode.UNAUTHENTICATED),
        (Security(token=TOKEN), LOAD, LOOPBACK, f"Bearer {TOKEN[1:]}", StatusCode.UNAUTHENTICATED),
        (Security(token=TOKEN), LOAD, LOOPBACK, f"Basic {TOKEN}", StatusCode.UNAUTHENTICATED),
        (Security(token=TOKEN), LOAD, LOOPBACK, TOKEN, StatusCode.UNAUTHENTICATED),
        (Security(token=TOKEN), LOAD, LOOPBACK, "Bearer ä", StatusCode.UNAUTHENTICATED),
        (Security(token=TOKEN), LOAD, ELSEWHERE, f"Bearer {TOKEN}", None),
        (Security(token=TOKEN), LOAD, ELSEWHERE, f"bearer {TOKEN}", None),
        (Security(token=TOKEN), "/grpc.health.v1.Health/Check", ELSEWHERE, None, None),
        (Security(token=TOKEN), ABORT, LOOPBACK, None, StatusCode.UNAUTHENTICATED),
        (Security(token=TOKEN), ABORT, LOOPBACK, f"Bearer {TOKEN}", None),
        (Security(token=TOKEN), ABORT, ELSEWHERE, f"Bearer {TOKEN}", StatusCode.PERMISSION_DENIED),
        (
            Security(token=TOKEN, admin_token=ADMIN_TOKEN),
            ABORT,
            LOOPBACK,
            f"Bearer {TOKEN}",
            StatusCode.UNAUTHENTICATED,
        ),
        (BOTH, ABORT, ELSEWHERE, f"Bearer {ADMIN_TOKEN}", None),
        (Security(admin_token=ADMIN_TOKEN), ABORT, LOOPBACK, None, StatusCode.UNAUTHENTICATED),
    ],
)
def test_who_may_call(security, method, peer, authorization, code):
    assert refusal(security, method, peer, authorization) == code


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_what_is_loopback(host, expected):
    assert is_loopback(host) == expected
    assert Security().warning(host) is None or not expected


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1.evil:1", "ipv4:", "", "unknown", "vsock:1:2"])
def test_odd_peers_are_not_loopback(peer):
    assert not is_loopback_peer(peer)


def test_an_open_port_is_warned_of(tmp_path):
    file = tmp_path / "file"
    assert "without encryption" in Security().warning("0.0.0.0")
    assert "to everyone" in Security().warning("0.0.0.0")
    assert "to everyone" not in Security(token=TOKEN).warning("0.0.0.0")
    assert Security(certificate=file, key=file, token=TOKEN).warning("0.0.0.0") is None
    assert Security(certificate=file, key=file, client_authority=file).warning("::") is None
    safe = {"name": "tiny", "security": Security(certificate=file, key=file, token=TOKEN)}
    assert not list(ServerConfig(**safe, host="0.0.0.0").warnings())
    [metrics] = ServerConfig(**safe, host="0.0.0.0", metrics_port=9400).warnings()
    assert "metrics on 0.0.0.0, port 9400, are open to all" in metrics
    assert not list(ServerConfig(**safe, metrics_port=9400).warnings())
    [dialect] = ServerConfig(**safe, dialect="vllm").warnings()
    assert "the smg gateway carries no token" in dialect


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "found 5 characters in 1 words, expected one word of at least 16"),
        (b"", "found 0 characters in 0 words"),
        (b"two words are not one", "in 5 words"),
        (b"\xff" * 20, "no ASCII"),
    ],
)
def test_weak_tokens_are_refused(tmp_path, content, message):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="--token-file .*: found") as raised:
        read_token("--token-file", path)
    assert message in str(raised.value)
    path.write_bytes(TOKEN.encode() + b"\n")
    assert read_token("--token-file", path) == TOKEN


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """Files of a server's certificate and key and of the authority; then a client's certificate and key, as bytes."""
    folder = tmp_path_factory.mktemp("pems")
    authority = trustme.CA()
    server, client = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("client")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    server.private_key_pem.write_to_path(folder / "key.pem")
    return folder, client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()


@pytest.mark.parametrize(
    ("certificate", "key", "authority", "message"),
    [
        ("cert.pem", "cert.pem", None, "--tls-key .*expected a certificate and its key"),
        ("key.pem", "key.pem", None, "--tls-cert .*expected a certificate and its key"),
        ("cert.pem", "other.pem", None, "key values mismatch, expected a certificate and its key"),
        ("cert.pem", "key.pem", "junk.pem", "--tls-client-ca .*: .*, expected certificates"),
        ("cert.pem", "key.pem", "key.pem", "--tls-client-ca .*: .*, expected certificates"),
    ],
)
def test_files_that_make_no_tls_are_told_apart(pems, certificate, key, authority, message):
    folder, client_key, _ = pems
    (folder / "other.pem").write_bytes(client_key)
    (folder / "junk.pem").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    security = Security(folder / certificate, folder / key, folder / authority if authority else None)
    with pytest.raises(ValueError, match=message):
        security.credentials()


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(tokenizer, pems, mutual):
    folder, client_key, client_certificate = pems
    authority = (folder / "ca.pem").read_bytes()
    security = Security(folder / "cert.pem", folder / "key.pem", folder / "ca.pem" if mutual else None)

    async def outcome(port, credentials):
        address = f"localhost:{port}"
        plain = credentials is None
        channel = grpc.aio.insecure_channel(address) if plain else grpc.aio.secure_channel(address, credentials)
        async with channel:
            call = model_pb2_grpc.ModelServiceStub(channel).GetLoad(model_pb2.GetLoadRequest(), timeout=5)
            return await call.code()

    async def run():
        async with serving(ScriptedEngine(tokenizer), security=security) as (server, _, _):
            known = grpc.ssl_channel_credentials(authority, client_key, client_certificate)
            nameless = StatusCode.UNAVAILABLE if mutual else StatusCode.OK
            assert await outcome(server.port, known) == StatusCode.OK
            assert await outcome(server.port, grpc.ssl_channel_credentials(authority)) == nameless
            assert await outcome(server.port, None) == StatusCode.UNAVAILABLE
            assert await outcome(server.port, grpc.ssl_channel_credentials()) == StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_tokens_over_the_wire(tokenizer):
    async def run():
        async with serving(ScriptedEngine(tokenizer), security=BOTH) as (_, channel, _):
            model, admin = model_pb2_grpc.ModelServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await model.GetLoad(model_pb2.GetLoadRequest())
            assert raised.value.code() == StatusCode.UNAUTHENTICATED
            assert "authorization: found none, expected a token" in raised.value.details()
            bearer = (("authorization", f"Bearer {TOKEN}"),)
            assert (await model.GetLoad(model_pb2.GetLoadRequest(), metadata=bearer)).slots == 2
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await admin.Abort(admin_pb2.AbortRequest(all=True), metadata=bearer)
            assert "found another, expected an admin token" in raised.value.details()
            bearer = (("authorization", f"Bearer {ADMIN_TOKEN}"),)
            assert not (await admin.Abort(admin_pb2.AbortRequest(all=True), metadata=bearer)).aborted

    asyncio.run(run())
