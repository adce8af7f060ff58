"""The monitor's numbers as Prometheus reads them (https://prometheus.io/docs/practices/naming/)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvkeep.server.monitor import Monitor, RequestView, Snapshot

_COMPACTION = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_FIRST_TOKEN = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1)


class Metrics:
    """A registry of its own: two servers in one process do not mix.

    Requests are counted when they end. Tokens and rows are read off the monitor when they are
    asked for, so a long answer counts while it is written.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "kvkeep_requests",
            "Requests that have ended, by path, HTTP status (499: the client left) and policy.",
            ["endpoint", "status", "eviction"],
            registry=self.registry,
        )
        self._compaction = self._histogram(
            "compaction_seconds", "Time of scoring and compacting one prompt's cache.", _COMPACTION
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _FIRST_TOKEN,
        )
        self._duration = self._histogram(
            "request_duration_seconds",
            "Time from a request's arrival to its end, refused ones left out.",
            _DURATION,
        )
        self._kept = self._histogram(
            "kept_ratio", "Share of a prompt's rows that its eviction kept.", _SHARES
        )
        self.registry.register(_Readings(monitor))
        monitor.listeners.append(self.count)

    def count(self, view: RequestView) -> None:
        """Count a request that has ended."""
        self._requests.labels(view.endpoint, str(view.status), view.policy).inc()
        if view.compact_s is not None:
            self._compaction.observe(view.compact_s)
        if view.compact_s is not None and view.prompt_tokens and view.retained_tokens is not None:
            self._kept.observe(view.retained_tokens / view.prompt_tokens)
        if view.first_token_s is not None:
            self._first_token.observe(view.first_token_s)
            self._duration.observe(view.age_s)

    def page(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type.

        Args:
            accept: the Accept header; OpenMetrics where it asks for it.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvkeep_{name}", text, buckets=buckets, registry=self.registry)


class _Readings(Collector):
    """What is read off the monitor at each scrape."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def describe(self) -> list[Metric]:
        """Nothing: the names are ours alone."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The counters and gauges of one snapshot."""
        now = self._monitor.snapshot()
        yield from _counters(now)
        yield from _gauges(now)


def _counters(now: Snapshot) -> Iterator[Metric]:
    totals = now.totals
    plain = (
        (
            "prompt_tokens",
            "Tokens of prompts, reused ones included.",
            totals.prompt_tokens,
        ),
        ("generated_tokens", "Tokens answered.", totals.generated_tokens),
        ("rows_kept", "Prompt rows per KV head that stayed after eviction.", totals.rows_kept),
        ("rows_evicted", "Prompt rows per KV head that were evicted.", totals.rows_evicted),
    )
    for name, text, value in plain:
        yield CounterMetricFamily(f"kvkeep_{name}", text, value=value)
    reused = CounterMetricFamily(
        "kvkeep_reused_tokens", "Prompt tokens taken from the prompt cache.", labels=["kind"]
    )
    for kind, tokens in totals.reused_tokens.items():
        reused.add_metric([kind], tokens)
    yield reused


def _gauges(now: Snapshot) -> Iterator[Metric]:
    sizes = GaugeMetricFamily("kvkeep_kv_bytes", "Bytes of KV rows held.", labels=["kind"])
    for kind, nbytes in now.in_flight.items():
        sizes.add_metric([f"in_flight_{kind}"], nbytes)
    for kind, stored in now.prompt_cache.items():
        sizes.add_metric([f"prompt_cache_{kind}"], stored.bytes)
    yield sizes
    entries = GaugeMetricFamily(
        "kvkeep_prompt_cache_entries", "Caches in the prompt cache.", labels=["kind"]
    )
    for kind, stored in now.prompt_cache.items():
        entries.add_metric([kind], stored.entries)
    yield entries
    live = GaugeMetricFamily("kvkeep_requests_live", "Requests in hand.", labels=["state"])
    for state, count in now.states.items():
        live.add_metric([state], count)
    yield live
    limit = now.limits.get("kv_memory")
    if limit is not None:
        text = "Most bytes of KV rows that the server may hold; absent without a limit."
        yield GaugeMetricFamily("kvkeep_kv_limit_bytes", text, value=limit)
