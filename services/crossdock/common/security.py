"""Certificates, keys and tokens on disk, in the form that grpc needs; reloaded when they change, without a restart.

    security = Security(config)              raises SecurityError if a file is missing or wrong
    security.server_credentials()            consulted at every handshake: new certificates apply to new connections
    security.channel_credentials()           for a new channel; `security.version` shows whether it is outdated
    security.http_server()                   for each connection of the HTTP server; `http_caller()` for HTTP clients

Files are replaced one by one, or all at once by a link (as in Kubernetes). A pair that does not match or parse is
reported once and the previous one stays in use. No secret is logged, and none is in a `repr`.
"""

from __future__ import annotations

import calendar
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from crossdock.common import log as logs
from crossdock.common.addresses import is_loopback
from crossdock.common.config import load
from crossdock.common.settings import SecurityConfig
from crossdock.common.small_files import read_small

log = logs.get(__name__)

MIN_TOKEN_CHARS = 16
PLAIN_TEXT = "plain text without authentication: every host that reaches this address can use and change the group"
_POLL_S = 0.5
"""Shortest interval between checks of token files; certificates are checked at each handshake."""
_TOKEN_HEADER = "authorization"
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18


class SecurityError(ValueError):
    """A certificate, key or token cannot be used; the message names the file and what is wrong, never its content."""


@dataclass(frozen=True, slots=True)
class _Pems:
    """PEM texts that were read together."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    not_after: float
    """Expiry of the first certificate of the chain, Unix seconds; 0 without one."""
    context: ssl.SSLContext | None = field(repr=False)
    """Of the HTTP server, with that certificate; None without one."""
    requests: ssl.SSLContext | None = field(repr=False)
    """The same of request connections."""


class TokenFile:
    """The tokens of one file, one per line; empty lines and lines that begin with # are ignored.

    If the file is missing or invalid, the previous tokens stay in use and `trouble` has the reason, without secrets.
    """

    def __init__(self, path: str) -> None:
        self._path, self._signature, self._looked_at = path, _signature((path,)), time.monotonic()
        self._tokens = _read_tokens(path)
        self.trouble = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        now = time.monotonic()
        if now - self._looked_at >= _POLL_S:
            self._looked_at = now
            self._reload()
        return self._tokens

    def _reload(self) -> None:
        signature = _signature((self._path,))
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._tokens, self.trouble = _read_tokens(self._path), ""
            log.info("tokens reloaded", file=self._path, tokens=len(self._tokens))
        except SecurityError as error:
            self.trouble = str(error)
            log.error("tokens not reloaded", why=self.trouble)


class Security:
    """Credentials of one process. Thread-safe: grpc uses them from its own threads.

    Raises:
        SecurityError: one of them cannot be used.
    """

    def __init__(self, config: SecurityConfig) -> None:
        self.config = config
        self._files = tuple(path for path in (config.cert_file, config.key_file, config.ca_file) if path)
        self._lock = threading.Lock()
        self._signature = _signature(self._files)
        self._pems = _read(config)
        self._version = 1
        self._token = TokenFile(config.token_file) if config.token_file else None
        self.accepted = {role: TokenFile(path) for role, path in config.access.token_files.items()}
        self.on_reload: Callable[[bool], None] = lambda ok: None
        """Called after each reload with its success."""

    def __repr__(self) -> str:
        return f"Security(cert_file={self.config.cert_file!r}, version={self._version})"

    @property
    def version(self) -> int:
        """Increases with each reload of the certificates."""
        self._current()
        return self._version

    @property
    def not_after(self) -> float:
        """Expiry of this process's certificate, Unix seconds; 0 without one."""
        return self._current().not_after

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a port; None: plain text, because no certificate is configured."""
        if not self.config.cert_file:
            return None
        given = self._version

        def fetch() -> grpc.ServerCertificateConfiguration:
            nonlocal given
            if self.version == given:
                return None  # type: ignore[return-value]  # means "unchanged" to grpc
            given = self._version
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(self._server_configuration(), fetch, self.config.requires_certs)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a channel, with the token in every call; None: plain text, because no authority is configured."""
        pems = self._current()
        if pems.ca is None:
            return None
        made = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        if self._token is None:
            return made
        return grpc.composite_channel_credentials(made, grpc.metadata_call_credentials(_Bearer(self._token)))

    def http_server(self) -> ssl.SSLContext | None:
        """For a new connection to the HTTP server; None: plain text, as configured."""
        return None if self.config.http == "plain" else self._current().context

    def request_server(self) -> ssl.SSLContext | None:
        """For a new request connection to this worker; None: plain text, because no certificate is configured."""
        return self._current().requests

    def request_caller(self) -> ssl.SSLContext | None:
        """For a request connection to a worker; None: plain text, because no authority is configured. Raises as
        `http_caller`."""
        return self.http_caller() if self.config.ca_file else None

    def token(self) -> str:
        """What this process sends to be known by; empty: nothing."""
        return self._token.tokens[0] if self._token is not None else ""

    def http_caller(self) -> ssl.SSLContext:
        """For a connection to the HTTP server of another process. Without a `ca_file` the system's authorities are
        used.

        Raises:
            OSError: files that are being replaced do not match (also ssl.SSLError).
        """
        pems = self._current()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if pems.ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=pems.ca.decode("ascii", "replace"))
        if self.config.cert_file:
            context.load_cert_chain(self.config.cert_file, self.config.key_file)
        return context

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self._current()
        roots = pems.ca if self.config.requires_certs else None
        return grpc.ssl_server_certificate_configuration([(pems.key or b"", pems.cert or b"")], roots)

    def _current(self) -> _Pems:
        with self._lock:
            signature = _signature(self._files)
            if signature == self._signature:
                return self._pems
            try:
                pems = _read(self.config)
            except SecurityError as error:
                log.error("certificates not reloaded", why=str(error))
                self.on_reload(False)
            else:
                if _signature(self._files) != signature:  # being replaced: check again next time
                    return self._pems
                self._pems, self._version = pems, self._version + 1
                log.info("certificates reloaded", file=self.config.cert_file or self.config.ca_file)
                self.on_reload(True)
            self._signature = signature
            return self._pems


class _Bearer(grpc.AuthMetadataPlugin):
    """Puts the newest token into each call. grpc sends it over TLS only."""

    def __init__(self, token: TokenFile) -> None:
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback(((_TOKEN_HEADER, f"Bearer {self._token.tokens[0]}"),), None)


def load_security(path: str | Path | None) -> SecurityConfig:
    """A SecurityConfig from a YAML file; None: no security. Relative paths start at its folder.

    Raises:
        ConfigFileError: unreadable, or a field that is unknown or wrong.
    """
    config = load(SecurityConfig, path)
    if path is None:
        return config
    folder = Path(path).absolute().parent
    return config.with_paths(lambda name: str(folder / name))


def security_of(config: SecurityConfig) -> Security | None:
    """None if the config is empty. Raises SecurityError."""
    return Security(config) if config.is_on else None


def warn_of_plain_text(address: str, security: Security | None) -> None:
    """Log a warning if a server can be reached from other hosts without TLS."""
    if security is None and not is_loopback(address):
        log.warning(PLAIN_TEXT, address=address, cure="security (docs/security.md)")


def _signature(paths: Sequence[str]) -> tuple[object, ...]:
    """Changes whenever one of the files does, also through a link."""
    made: list[object] = []
    for path in paths:
        try:
            found = os.stat(path)
            made.append((found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev))
        except OSError as error:
            made.append(error.errno)
    return tuple(made)


def _bytes_of(path: str) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise SecurityError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SecurityError(f"{path}: {error}") from None


def _read(config: SecurityConfig) -> _Pems:
    cert = key = ca = context = requests = None
    not_after = 0.0
    if config.cert_file:
        context, requests = (_server_context(config.cert_file, config.key_file) for _ in range(2))
        cert, key = _bytes_of(config.cert_file), _bytes_of(config.key_file)
        not_after = end_of(cert, config.cert_file)
    if config.ca_file:
        ca = _bytes_of(config.ca_file)
        judging = context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            judging.load_verify_locations(cadata=ca.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError):  # a file that is empty, just being written, is a ValueError
            raise SecurityError(f"{config.ca_file}: expected certificates in PEM, got something else") from None
        judging.verify_mode = ssl.CERT_OPTIONAL if config.http == "mtls" else ssl.CERT_NONE
        if requests is not None and config.requires_certs:
            requests.load_verify_locations(cadata=ca.decode("ascii"))
            requests.verify_mode = ssl.CERT_REQUIRED
    return _Pems(cert, key, ca, not_after, context, requests)


def _server_context(cert_file: str, key_file: str) -> ssl.SSLContext:
    def refuse() -> str:
        raise SecurityError(f"{key_file}: expected an unencrypted private key, got an encrypted one")

    for path in (cert_file, key_file):
        _bytes_of(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_file, key_file, refuse)
    except (ssl.SSLError, OSError):
        message = f"{cert_file}, {key_file}: expected a PEM certificate and its private key, got no such pair"
        raise SecurityError(message) from None
    return context


def _read_tokens(path: str) -> tuple[str, ...]:
    text = _bytes_of(path).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise SecurityError(f"{path}: expected at least one token, got none")
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
            wanted = f"tokens of {MIN_TOKEN_CHARS} or more printable ASCII characters without spaces"
            raise SecurityError(f"{path}: expected {wanted}, got another one (of {len(token)} characters)")
    return tokens


def end_of(pem: bytes, path: str) -> float:
    """notAfter of the first certificate in a PEM text, Unix seconds. Raises SecurityError."""
    try:
        first = pem[: pem.index(b"-----END CERTIFICATE-----")] + b"-----END CERTIFICATE-----\n"
        der = ssl.PEM_cert_to_DER_cert(first[first.index(b"-----BEGIN") :].decode("ascii"))
        return _not_after(der)
    except (ValueError, IndexError):
        raise SecurityError(f"{path}: expected an X.509 certificate in PEM, got something else") from None


def _not_after(der: bytes) -> float:
    """Certificate -> tbsCertificate -> version?, serial, signature, issuer, validity (notBefore, notAfter)."""
    body = _children(_children(der)[0][1])[0][1]
    fields = _children(body)
    if fields[0][0] == _VERSION:
        fields = fields[1:]
    tag, text = _children(fields[3][1])[1]
    if tag not in {_UTC_TIME, _GENERALIZED_TIME}:
        raise ValueError("notAfter")
    layout = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return float(calendar.timegm(time.strptime(text.decode("ascii"), layout)))


def _children(der: bytes) -> list[tuple[int, bytes]]:
    """(tag, content) of each element that stands in these bytes."""
    found, at = [], 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(der[at : at + count], "big")
            at += count
        if at + size > len(der):
            raise ValueError("truncated")
        found.append((tag, der[at : at + size]))
        at += size
    return found
