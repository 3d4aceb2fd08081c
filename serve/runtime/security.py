"""Who may call: TLS, mutual TLS, bearer tokens, and the loopback rule for operators' calls."""

import hmac
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import StatusCode

from jaxspec.serve.runtime.refusal import Refusal

HEALTH, ADMIN = "/grpc.health.v1.Health/", "/jaxspec.v1.AdminService/"
SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Security:
    """How the port is protected.

    Attributes:
      certificate, key: PEM files of the server; both or none.
      client_authority: PEM file; clients must show a certificate that it signed.
      token: bearer token that every call but the health service's must carry; None asks for none.
      admin_token: the one that AdminService wants instead. Without it that service is for loopback peers only.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_authority: Path | None = None
    token: str | None = None
    admin_token: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing, given = ("--tls-key", "--tls-cert") if self.key is None else ("--tls-cert", "--tls-key")
            raise ValueError(f"{missing}: found none, expected a file, since {given} is given")
        if self.client_authority is not None and self.certificate is None:
            raise ValueError("--tls-client-ca: found without --tls-cert and --tls-key, expected with them")

    def credentials(self) -> grpc.ServerCredentials | None:
        """Makes the credentials of a TLS port; returns None for a plaintext one.

        Raises:
          OSError: a file can't be read.
          ValueError: a file is no PEM, or the key is another's.
        """
        if self.certificate is None or self.key is None:
            return None
        certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        try:  # gRPC would only say that it can't listen
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"--tls-cert {self.certificate}, --tls-key {self.key}: {_reason(error)}, expected a certificate and "
                "its key in PEM, without a password"
            ) from None
        authority = None
        if self.client_authority is not None:
            authority = read_authority("--tls-client-ca", self.client_authority)
        return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=authority is not None)

    def check(self, method: str, context: Any) -> None:
        """Raises Refusal where this call is not allowed."""
        if method.startswith(HEALTH):
            return
        metadata = dict(context.invocation_metadata() or ())
        if method.startswith(ADMIN) and self.admin_token is not None:
            _compare(metadata, self.admin_token, "an admin token")
            return
        if self.token is not None:
            _compare(metadata, self.token, "a token")
        if method.startswith(ADMIN) and not is_loopback_peer(context.peer()):
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                "AdminService: found a call from another machine, expected one from loopback; "
                "give the server an admin token to allow others",
            )

    def warning(self, host: str) -> str | None:
        """Says what is unsafe about listening on `host`; returns None if nothing is."""
        if is_loopback(host):
            return None
        open_ = []
        if self.certificate is None:
            open_.append("without encryption (--tls-cert, --tls-key)")
        if self.token is None and self.client_authority is None:
            open_.append("to everyone who reaches the port (--token-file, --tls-client-ca)")
        return f"WARNING: {host} is open {' and '.join(open_)}" if open_ else None


def read_token(option: str, path: Path) -> str:
    """Reads the token that a file holds.

    Raises:
      OSError: the file can't be read.
      ValueError: it holds no token fit for use.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path}: found bytes that are no ASCII, expected one line of text") from None
    if len(token) < SHORTEST_TOKEN or len(token.split()) != 1:
        raise ValueError(
            f"{option} {path}: found {len(token)} characters in {len(token.split())} words, expected one word of at "
            f"least {SHORTEST_TOKEN}"
        )
    return token


def read_authority(option: str, path: Path) -> bytes:
    """Reads the PEM data of the certificates that others' are checked with.

    Raises:
      OSError: the file can't be read.
      ValueError: it holds no certificate.
    """
    data = path.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{option} {path}: {_reason(error)}, expected certificates in PEM") from None
    return data


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback_peer(peer: str) -> bool:
    """Whether gRPC's name for a peer, as in "ipv4:127.0.0.1:5000", is of this machine."""
    kind, _, address = unquote(peer).partition(":")
    return kind == "unix" or (kind in ("ipv4", "ipv6") and is_loopback(address.rpartition(":")[0]))


def _compare(metadata: dict[str, Any], token: str, expected: str) -> None:
    given = metadata.get("authorization", "")
    scheme, _, credential = given.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(credential.strip().encode(), token.encode()):
        found = "none" if not given else "another"
        raise Refusal(StatusCode.UNAUTHENTICATED, f"authorization: found {found}, expected {expected} (Bearer …)")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
