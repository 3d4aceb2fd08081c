"""Messages that are malformed, or hold a field that the server does not know, are refused by every service."""

import grpc
import pytest

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


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
