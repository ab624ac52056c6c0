"""Clients of the expert service: `Client` and `AsyncClient` for rows of one layer, `attach` for a whole torch model."""

from crossdock.client.attach import Attached, attach
from crossdock.client.blocking import Client
from crossdock.client.client import AsyncClient
from crossdock.client.errors import (
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ModelMismatch,
    NotAllowed,
    Overloaded,
    Unavailable,
)
from crossdock.client.remote_experts import RemoteExperts

__all__ = [
    "AsyncClient",
    "Attached",
    "Client",
    "ClientError",
    "DeadlineExceeded",
    "InvalidRequest",
    "ModelMismatch",
    "NotAllowed",
    "Overloaded",
    "RemoteExperts",
    "Unavailable",
    "attach",
]
