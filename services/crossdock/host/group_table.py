"""A group view as people see it while it comes up: headline, a row per rank, and a warning of open addresses. No I/O.

`crossdock status` (cli/status.py) shows more of it by the same means.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from crossdock.common.announce import metrics_url
from crossdock.protocol.v1.control_pb2 import EXCHANGING, FORMING, SERVING, GroupState, GroupView, Member

_STYLE = {SERVING: "green", EXCHANGING: "yellow", FORMING: "yellow"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI = 1024
_NAMED = 2
_ADDRESS_COLUMNS: dict[str, JustifyMethod] = {"rank": "right", "worker": "left", "address": "left", "metrics": "left"}


def plain_text_warning(exposed: Sequence[str]) -> list[Text]:
    """One line, or none where no address is exposed."""
    if not exposed:
        return []
    more = f" and {len(exposed) - _NAMED} more" if len(exposed) > _NAMED else ""
    words = f"plain text without authentication at {', '.join(exposed[:_NAMED])}{more}: every host that reaches it"
    return [Text(f"WARNING: {words} can use and change the group (docs/security.md)", style="bold yellow")]


def as_address_table(view: GroupView, target: str) -> Group:
    """The headline, and where each rank listens."""
    rows = {
        member.rank: [
            Text(str(member.rank)),
            Text(member.worker.uid),
            Text(member.address),
            Text(metrics_url(member.http_address, https=member.https)),
        ]
        for member in view.members
    }
    return Group(headline(view, target), Text(), rank_table(view, _ADDRESS_COLUMNS, rows))


def headline(view: GroupView, target: str) -> Text:
    """State, epoch, how many ranks there are, and whom the view is from."""
    here = sum(member.rank < view.world_size for member in view.members)
    return Text.assemble(
        (GroupState.Name(view.state), f"bold {_STYLE.get(view.state, '')}"),
        f"  epoch {view.epoch}  {here}/{view.world_size} ranks",
        (f"  control plane {target}", "dim"),
    )


def state_of(member: Member) -> str:
    """A word for the state of a member."""
    return "sick" if member.sick else "ready" if member.ready else "joining"


def rank_table(view: GroupView, columns: dict[str, JustifyMethod], rows: dict[int, list[Text]]) -> Table:
    """A row per rank, lost ones too; `rows` holds the cells of the others."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, justify in columns.items():
        folds = title == "worker"  # a long one takes several lines, so that no head and no number is cut
        table.add_column(title, justify=justify, no_wrap=not folds, overflow="fold", min_width=cell_len(title))
    for rank in view.lost_ranks:
        rows.setdefault(rank, [Text(str(rank)), Text("lost", style="red")])
    for rank in sorted(rows):
        table.add_row(*rows[rank])
    return table


def format_bytes(num_bytes: float) -> str:
    """Four digits and a binary unit: "1.25 GiB"."""
    for unit in _UNITS[:-1]:
        if num_bytes < _KIBI:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= _KIBI
    return f"{num_bytes:.4g} {_UNITS[-1]}"
