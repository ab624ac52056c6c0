"""Keys and kubeconfigs of a cluster that lives for one test run, by the command openssl."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DAYS = "2"


@dataclass(frozen=True)
class Authority:
    """A certificate authority and what it signs, all in `folder`."""

    folder: Path

    @staticmethod
    def new(folder: Path) -> Authority:
        """Make the authority and the key pair that signs service account tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        made = Authority(folder)
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", DAYS, "-subj", "/CN=crossdock-bed",
            "-keyout", made.path("ca.key"), "-out", made.path("ca.crt"),
        )  # fmt: skip
        _openssl("genrsa", "-out", made.path("sa.key"), "2048")
        _openssl("rsa", "-in", made.path("sa.key"), "-pubout", "-out", made.path("sa.pub"))
        return made

    def path(self, name: str) -> str:
        """Path of a file of the authority."""
        return str(self.folder / name)

    def sign(self, name: str, user: str, group: str, names: Sequence[str] = ()) -> None:
        """`name`.crt and `name`.key for a user of a group; `names` like DNS:localhost or IP:127.0.0.1."""
        extensions = self.folder / f"{name}.ext"
        alternatives = ",".join(names) or f"DNS:{name}"
        extensions.write_text(f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth,clientAuth\n")
        request = self.path(f"{name}.csr")
        subject = f"/O={group}/CN={user}"
        key = self.path(f"{name}.key")
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", subject)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.path("ca.crt"), "-CAkey", self.path("ca.key"),
            "-CAcreateserial", "-days", DAYS, "-extfile", str(extensions), "-out", self.path(f"{name}.crt"),
        )  # fmt: skip

    def kubeconfig(self, name: str, server: str) -> Path:
        """A kubeconfig (JSON is YAML) of the user whose pair is `name`."""
        user = {"client-certificate-data": self._data(f"{name}.crt"), "client-key-data": self._data(f"{name}.key")}
        cluster = {"server": server, "certificate-authority-data": self._data("ca.crt")}
        made = self.folder / f"{name}.kubeconfig"
        made.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "bed", "cluster": cluster}],
                    "users": [{"name": "user", "user": user}],
                    "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "user"}}],
                    "current-context": "bed",
                }
            )
        )
        return made

    def _data(self, name: str) -> str:
        return base64.b64encode((self.folder / name).read_bytes()).decode()


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
