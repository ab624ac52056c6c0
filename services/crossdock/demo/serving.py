"""The demo's service: a control plane and its workers, over the hosts of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from crossdock.common.config import ControlConfig
from crossdock.demo.hosts import HostPlace
from crossdock.demo.stage import Stage
from crossdock.host.supervisor import Supervisor

Name = Literal["float32", "bfloat16"]
FORM_TIMEOUT_S = 180.0


@contextmanager
def serving(folder: Path, name: Name, where: Stage, places: Sequence[HostPlace]) -> Iterator[Supervisor]:
    """The processes of every host: a supervisor with the control plane and the first workers, one for each other host.
    Those of the others are stopped first: workers leave while there is a control plane."""
    free = f"{places[0].address}:0"
    control = ControlConfig(listen=free, http_listen=free, world_size=where.num_workers, security=where.security)
    first, *others = where.workers(str(folder), name, places)
    with ExitStack() as stack:
        group = stack.enter_context(Supervisor(control, first, folder / f"logs-{name}"))
        for number, workers in enumerate(others, start=1):
            joining = [msgspec.structs.replace(worker, control=group.control_address) for worker in workers]
            logs, enter = folder / f"logs-{name}-host-{number}", places[number].enter
            stack.enter_context(Supervisor(None, joining, logs, enter=enter))
        yield group
