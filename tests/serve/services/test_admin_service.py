"""AdminService of a real server process."""

import grpc
import pytest

from jaxspec.v1 import admin_pb2
from jaxspec.v1 import generation_pb2 as pb
from tests.support.requests import begun, request

INVALID = grpc.StatusCode.INVALID_ARGUMENT


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
