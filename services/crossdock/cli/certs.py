"""`crossdock certs`: an authority of one's own and certificates for every part of a group: mTLS without a PKI.

    FOLDER/ca.pem, ca.key                        the authority; ca.key can admit any caller
    FOLDER/NAME.pem, NAME.key, NAME.yaml         one part each: its certificate, its key, the `security` config for it

Made by the `openssl` command. Run again it keeps the authority and makes the parts anew, which running processes take
up by themselves.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crossdock.common.config import ConfigFileError, dump
from crossdock.common.settings import SecurityConfig
from crossdock.common.small_files import write_text

CONTROL_NAME, WORKER_NAME = "crossdock-control", "crossdock-worker"
_TIMEOUT_S = 30.0
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True)
class CertificateRole:
    """What a certificate is for.

    Attributes:
        name: of its files.
        names: that it carries, beside the hosts.
        serves: it may be shown by a server.
    """

    name: str
    names: tuple[str, ...]
    serves: bool


PARTS = (
    CertificateRole("control", (CONTROL_NAME,), serves=True),
    CertificateRole("worker", (WORKER_NAME,), serves=True),
    CertificateRole("host", (CONTROL_NAME, WORKER_NAME), serves=True),  # `crossdock up`: both
    CertificateRole("client", ("crossdock-client",), serves=False),
    CertificateRole("operator", ("crossdock-operator",), serves=False),
)


def make_all(folder: Path, hosts: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Make the authority, unless it is there, and every part; the paths of their configs.

    Args:
        folder: made if missing, readable by its owner only.
        hosts: names and addresses under which servers are dialled, beside localhost.
        days: until the parts end; the authority lasts ten times as long.

    Raises:
        ConfigFileError: no `openssl` here, or it refused; with its last words.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "ca.pem").exists():
        make_authority(folder, days=10 * days)
    return [issue(folder, part, hosts, days) for part in PARTS]


def make_authority(folder: Path, name: str = "ca", days: int = 3650) -> None:
    """NAME.pem and NAME.key. Raises ConfigFileError."""
    extensions = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    subject = ("-subj", "/CN=crossdock authority")
    _openssl(
        folder, "req", "-x509", *_CURVE, "-days", str(days), *subject, *extensions,
        "-keyout", f"{name}.key", "-out", f"{name}.pem",
    )  # fmt: skip


def issue(
    folder: Path, part: CertificateRole, hosts: Sequence[str] = (), days: int = 365, authority: str = "ca"
) -> Path:
    """Certificate, key and config of a part, put in place at once; the config's path. Raises ConfigFileError."""
    new = f".{part.name}.new"
    local = ("localhost", "127.0.0.1", "::1", *hosts) if part.serves else ()
    write_text(
        folder / f"{new}.ext",
        f"subjectAltName={','.join([*map(_san, part.names), *map(_san, local)])}\n"
        f"extendedKeyUsage={'serverAuth,' if part.serves else ''}clientAuth\n"
        "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n",
    )
    subject = ("-subj", f"/CN={part.name}")
    _openssl(folder, "req", *_CURVE, *subject, "-keyout", f"{new}.key", "-out", f"{new}.csr")
    _openssl(
        folder, "x509", "-req", "-in", f"{new}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
        "-CAcreateserial", "-days", str(days), "-extfile", f"{new}.ext", "-out", f"{new}.pem",
    )  # fmt: skip
    for kind in ("key", "pem"):
        os.replace(folder / f"{new}.{kind}", folder / f"{part.name}.{kind}")
    for kind in ("csr", "ext"):
        (folder / f"{new}.{kind}").unlink()
    config = SecurityConfig(
        cert_file=f"{part.name}.pem",
        key_file=f"{part.name}.key",
        ca_file="ca.pem",
        control_name=CONTROL_NAME,
        worker_name=WORKER_NAME,
    )
    path = folder / f"{part.name}.yaml"
    write_text(path, dump(config))
    return path


def _san(name: str) -> str:
    if "://" in name:
        return f"URI:{name}"
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def _openssl(folder: Path, *arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise ConfigFileError("openssl: expected the command of that name on this machine, got none")
    old = os.umask(0o077)
    try:
        done = subprocess.run(
            [program, *arguments], cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    finally:
        os.umask(old)
    if done.returncode:
        raise ConfigFileError(f"openssl {arguments[0]}: {done.stderr.strip().rpartition(chr(10))[2]}")
