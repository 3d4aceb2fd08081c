"""How our own clients reach a server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jaxspec.serve.runtime.security import read_authority, read_token


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, and what it wants to see of its clients.

    Attributes:
      address: host:port.
      authority: PEM data of what signed the server's certificate; None for a plaintext port.
      token: bearer token, or None.
    """

    address: str
    authority: bytes | None = None
    token: str | None = None

    @classmethod
    def of(cls, address: str, authority: Path | None, token_file: Path | None) -> "ServerAddress":
        """Makes one from a command's options.

        Raises:
          OSError, ValueError: a file can't be read, or holds no certificate or no token.
        """
        return cls(
            address,
            None if authority is None else read_authority("--tls-ca", authority),
            None if token_file is None else read_token("--token-file", token_file),
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call must carry."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel(self) -> grpc.Channel:
        """Opens a channel for calls that block."""
        return self._channel(grpc)

    def aio_channel(self) -> grpc.aio.Channel:
        """Opens a channel for calls on an event loop."""
        return self._channel(grpc.aio)

    def _channel(self, library: Any) -> Any:
        if self.authority is None:
            return library.insecure_channel(self.address)
        return library.secure_channel(self.address, grpc.ssl_channel_credentials(self.authority))
