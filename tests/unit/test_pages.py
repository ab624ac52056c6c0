"""One page of metrics for a host: whose series are on it, in which format, and what a silent process costs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from crossdock.common.announce import Addresses
from crossdock.common.http import HttpServer, labelled, page_of, serve_http
from crossdock.common.metrics import ControlMetrics, DeclaredMetrics, HostMetrics, WorkerMetrics
from crossdock.host import pages
from crossdock.host.pages import HostMetricsPage, merged

NAMES = ["control", "worker-0", "worker-1"]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Bed:
    """Three processes with a page each, and the host's page over them."""

    def __init__(self) -> None:
        self.metrics: dict[str, DeclaredMetrics] = {
            "control": ControlMetrics(), "worker-0": WorkerMetrics(), "worker-1": WorkerMetrics(),
        }  # fmt: skip
        self.servers = {name: serve(page_of(metrics.registry, "g")) for name, metrics in self.metrics.items()}
        self.where = {name: Addresses("unused:1", server.address) for name, server in self.servers.items()}
        self.host = HostMetrics()
        for name in NAMES:
            self.host.process_up.labels(process=name).set(1)
        self.page = HostMetricsPage(self.host, lambda: NAMES, lambda: dict(self.where), None, "g")

    def worker(self, number: int) -> WorkerMetrics:
        found = self.metrics[f"worker-{number}"]
        assert isinstance(found, WorkerMetrics)
        return found

    def series(self) -> Series:
        text = self.page("")[0].decode()
        return {(s.name, frozenset(s.labels.items())): s.value for f in parse(text) for s in f.samples}


def serve(page: Callable[[str], tuple[bytes, str]]) -> HttpServer:
    return serve_http("127.0.0.1:0", page, lambda: (True, "ok"))


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({**labels, "group": "g"}.items())


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    for server in made.servers.values():
        server.close()


def test_every_series_of_every_process_is_there_once(bed: Bed) -> None:
    bed.worker(0).rank.set(3)
    bed.worker(1).rank.set(1)
    bed.worker(1).expert_rows_total.labels("7").inc(5)
    bed.worker(1).step_tokens.observe_many([3, 900])
    found = bed.series()
    assert found[of("crossdock_rank", process="worker-0")] == 3
    assert found[of("crossdock_rank", process="worker-1")] == 1
    assert found[of("crossdock_expert_rows_total", process="worker-1", expert="7")] == 5
    assert found[of("crossdock_step_tokens_bucket", process="worker-1", le="4.0")] == 1
    assert found[of("crossdock_is_leader", process="control")] == 0
    assert {found[of("crossdock_process_scraped", process=name)] for name in NAMES} == {1}
    assert of("process_start_time_seconds") in found
    wanted = {
        (sample.name, frozenset({**sample.labels, "process": name, "group": "g"}.items()))
        for name, metrics in bed.metrics.items()
        for family in parse(choose_encoder("")[0](metrics.registry).decode())
        for sample in family.samples
    }
    assert wanted <= set(found)
    lines = [line for line in bed.page("")[0].decode().splitlines() if not line.startswith("#")]
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines}) == len(found)


@pytest.mark.parametrize("accept", ["", OPENMETRICS, f"{OPENMETRICS};q=0.5,text/plain;version=1.0.0;q=0.4"])
def test_each_metric_is_declared_once_in_the_format_asked_for(bed: Bed, accept: str) -> None:
    bed.worker(0).queue_duration_seconds.observe(0.01, {"trace_id": "a" * 32})
    bed.worker(1).queue_duration_seconds.observe(0.02, {"trace_id": "b" * 32})
    body, content_type = bed.page(accept)
    assert content_type == choose_encoder(accept)[1]
    text = body.decode()
    kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    reads = parse_openmetrics if "openmetrics" in content_type else parse
    families = {family.name: family for family in reads(text)}
    assert {s.labels["process"] for s in families["crossdock_rank"].samples} == {"worker-0", "worker-1"}
    if "openmetrics" in content_type:
        assert text.count("# EOF") == 1
        exemplars = {
            (sample.labels["process"], sample.exemplar.labels["trace_id"][0])
            for sample in families["crossdock_queue_duration_seconds"].samples
            if sample.exemplar
        }
        assert exemplars == {("worker-0", "a"), ("worker-1", "b")}


def test_the_series_of_a_process_that_is_gone_or_silent_end(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SCRAPE_TIMEOUT_S", 0.3)
    bed.where.pop("worker-0")  # not listening: killed, and not up again
    silent = threading.Event()

    def stopped(accept: str) -> tuple[bytes, str]:
        silent.wait(10)
        return b"", "text/plain"

    server = serve(stopped)
    bed.where["worker-1"] = Addresses("unused:1", server.address)
    began = time.monotonic()
    found = bed.series()
    assert time.monotonic() - began < 5
    of_whom = {labels["process"] for name, labels in ((n, dict(k)) for n, k in found) if name == "crossdock_epoch"}
    assert of_whom == {"control"}
    scraped = [found[of("crossdock_process_scraped", process=name)] for name in NAMES]
    assert scraped == [1, 0, 0]
    silent.set()
    server.close()
    bed.where["worker-0"] = Addresses("unused:1", bed.servers["worker-0"].address)
    assert of("crossdock_epoch", process="worker-0") in bed.series()


def test_scrapers_that_come_together_share_a_page() -> None:
    """Else each of many connections would have every process asked, one after the other."""
    asked: list[str] = []
    first, go_on = threading.Event(), threading.Event()

    def slow(accept: str) -> tuple[bytes, str]:
        asked.append(accept)
        first.set()
        go_on.wait(10)
        return f"# HELP a b\n# TYPE a gauge\na {len(asked)}\n".encode(), "text/plain"

    server = serve(slow)
    page = HostMetricsPage(
        HostMetrics(), lambda: ["w"], lambda: {"w": Addresses("unused:1", server.address)}, None, "g"
    )
    found: list[bytes] = []
    scrapers = [threading.Thread(target=lambda: found.append(page("")[0])) for _ in range(8)]
    scrapers[0].start()
    assert first.wait(10)
    for scraper in scrapers[1:]:
        scraper.start()
    time.sleep(0.2)  # they wait at the lock
    go_on.set()
    for scraper in scrapers:
        scraper.join(10)
    server.close()
    assert len(found) == 8
    assert len(asked) == 2
    assert sum(b'a{process="w"} 2' in one for one in found) == 7


def test_a_label_comes_first_and_comments_stay() -> None:
    page = '# HELP a of x 1\n# TYPE a gauge\na 1\na{b="x{y} z"} 2\n'
    page += '# HELP c d\n# TYPE c counter\nc_total{e="f"} 3 # {t="u"} 1 2\n'
    once = labelled(page, "process", "p")
    assert once.splitlines()[2:4] == ['a{process="p"} 1', 'a{process="p",b="x{y} z"} 2']
    assert once.splitlines()[6] == 'c_total{process="p",e="f"} 3 # {t="u"} 1 2'
    both = merged([once, labelled(page, "process", "q")])
    assert [line for line in both.splitlines() if line.startswith("# TYPE")] == ["# TYPE a gauge", "# TYPE c counter"]
    assert both.splitlines().index("# HELP c d") > both.splitlines().index('a{process="q"} 1')
    assert merged([once + "# EOF\n", once + "# EOF\n"]).endswith("1 2\n# EOF\n")
    assert merged(["", ""]) == ""


def test_metrics_of_one_name_are_of_one_kind() -> None:
    """On one page a metric is declared once, by the first process that has it."""
    kinds: dict[str, set[tuple[str, str]]] = {}
    for metrics in (HostMetrics(), ControlMetrics(), WorkerMetrics()):
        for one in metrics.declarations():
            kinds.setdefault(one.name, set()).add((one.kind, one.unit))
            assert "process" not in one.labels or isinstance(metrics, HostMetrics)
    assert [name for name, found in kinds.items() if len(found) > 1] == []


def test_a_scraper_that_asks_for_ever_other_versions_costs_no_memory(bed: Bed) -> None:
    """The content type of an answer repeats the version that was asked for."""
    sizes = []
    tracemalloc.start()
    for number in range(30):
        body, content_type = bed.page(f"application/openmetrics-text; version=1.{number}.0")
        assert f"version=1.{number}.0" in content_type
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] - sizes[4] < 5 * len(body)


def test_a_process_that_answers_drop_by_drop_is_left_out_in_time(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose host gives it hardly any time: each read succeeds, the whole does not."""
    monkeypatch.setattr(pages, "SCRAPE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def drip() -> None:
            sock, _ = slow.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(4096)
                sock.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    sock.sendall(b"#")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        bed.where["worker-1"] = Addresses("unused:1", f"127.0.0.1:{slow.getsockname()[1]}")
        began = time.monotonic()
        found = bed.series()
        assert time.monotonic() - began < 3
    assert found[of("crossdock_process_scraped", process="worker-1")] == 0
    assert of("crossdock_epoch", process="worker-0") in found


def test_another_server_at_a_processs_address_hides_nobody(bed: Bed) -> None:
    server = serve(lambda accept: (b"<html>\n# HELP\n</html>", "text/html"))
    bed.where["worker-1"] = Addresses("unused:1", server.address)
    found = bed.series()
    assert found[of("crossdock_process_scraped", process="worker-1")] == 0
    assert of("crossdock_epoch", process="worker-0") in found
    server.close()
