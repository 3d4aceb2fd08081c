"""What a call is refused with: a status code, and a message that names field, value found and value expected."""

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status

# Of a message, in UTF-8: it travels three times in metadata, of which clients take no more than 8 kB.
MAX_MESSAGE_BYTES = 1000


class Refusal(Exception):
    """Ends a call with a status.

    Args:
      code: the status's.
      message: one line; the middle of a very long one is left out.
      field: of the request, in dots, where one is at fault.
      retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, code: StatusCode, message: str, *, field: str = "", retry_after: float | None = None):
        message = _shortened(message)
        super().__init__(message)
        self.code, self.message, self.field, self.retry_after = code, message, field, retry_after

    def status(self) -> object:
        """Makes what `context.abort_with_status` takes, with google.rpc.BadRequest and RetryInfo where they apply."""
        details = []
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(self.retry_after * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = [any_pb2.Any() for _ in details]
        for message, detail in zip(packed, details, strict=True):
            message.Pack(detail)
        return rpc_status.to_status(status_pb2.Status(code=self.code.value[0], message=self.message, details=packed))


def invalid(field: str, found: object, expected: str) -> Refusal:
    """Makes an INVALID_ARGUMENT for a field of the request."""
    return Refusal(StatusCode.INVALID_ARGUMENT, f"{field}: found {found}, expected {expected}", field=field)


def _shortened(message: str) -> str:
    data = message.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        half = MAX_MESSAGE_BYTES // 2
        return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"
    return data.decode()
