"""The server's certificate: read and tried before anything else starts, so that what is wrong with it is said then."""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from worldkv.server.config import ServerConfig

_SOON_S = 14 * 86400.0

logger = logging.getLogger(__name__)


def check_certificate(config: ServerConfig) -> None:
    """Raises ValueError, naming the option, for files that no client could be served with. Warns of a near end."""
    if config.tls_cert is not None and config.tls_key is not None:
        ends = Certificate.checked(config.tls_cert, config.tls_key).ends_at
        if ends - time.time() < _SOON_S:
            day = datetime.fromtimestamp(ends, UTC).strftime("%Y-%m-%d")
            logger.warning("the certificate ends on %s", day, extra={"event": "certificate_ends"})


@dataclass(frozen=True)
class Certificate:
    """`names`: whom it is for. `ends_at`: seconds since 1970."""

    names: tuple[str, ...]
    ends_at: float

    @classmethod
    def checked(cls, cert: Path, key: Path) -> Certificate:
        """Raises ValueError, naming the option, for files that no client could be served with."""
        for option, path in (("tls_cert", cert), ("tls_key", key)):
            _require_pem(option, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            why = (error.reason or "").lower().replace("_", " ") or str(error)
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"tls_key: {key} is not the key of the certificate in {cert}") from error
            raise ValueError(f"tls_cert, tls_key: {cert} and {key} cannot be used: {why}") from error
        return cls._of(_try(context, cert))

    @classmethod
    def _of(cls, peer: dict[str, object]) -> Certificate:
        names = tuple(str(name) for _, name in peer.get("subjectAltName", ()))  # type: ignore[attr-defined]
        return cls(names, ssl.cert_time_to_seconds(str(peer["notAfter"])))


def _require_pem(option: str, path: Path) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be read: {error.strerror or error}") from error
    if b"-----BEGIN " not in text:
        raise ValueError(f"{option}: expected a PEM file (-----BEGIN ...), got something else in {path}")


def _no_password() -> str:
    raise ValueError("tls_key: has a password, which nobody is there to type; write it without (openssl pkey)")


def _try(server_context: ssl.SSLContext, cert: Path) -> dict[str, object]:
    """Shake hands with ourselves, as a client that trusts this certificate: what is left to refuse is its time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cert)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"tls_cert: no client will trust {cert}: {error.verify_message}") from error
    peer = client.getpeercert()
    assert peer is not None
    return dict(peer)
