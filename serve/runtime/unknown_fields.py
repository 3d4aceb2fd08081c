"""Fields that a client's protos have and ours do not: refused, since ignoring one would change what the call means."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import StatusCode

from jaxspec.serve.runtime.refusal import Refusal


def check_known(message: Message, where: str = "request") -> None:
    """Raises Refusal where the message itself, not what is inside it, has a field that the protos here do not know."""
    for unknown in UnknownFieldSet(message):
        raise Refusal(
            StatusCode.UNIMPLEMENTED,
            f"{where}: found field number {unknown.field_number}, which this server does not know; leave it unset",
            field=where,
        )
