"""``/metrics``: counts and times under llama.cpp's and vLLM's names, for Prometheus.

The engine thread and the event loop update plain numbers. They become Prometheus families when
scraped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest

from treadle.server.http.api_errors import ApiError
from treadle.server.http.http_io import Response
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from prometheus_client import Metric


async def metrics(request: HttpRequest) -> Response:
    """``GET /metrics``: the server's metrics as Prometheus' text; 501 without ``--metrics``."""
    service = service_of(request)
    if not service.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="not_enabled")
    return Response(
        exposition(service),
        headers={"Process-Start-Time-Unix": str(service.created)},  # llama.cpp's
        media_type="text/plain; version=0.0.4",
    )


def exposition(service: Service) -> bytes:
    """Return the server's metrics as Prometheus' text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(service))
    return generate_latest(registry)


class _Families:
    """Prometheus collector of one Service: reads its counters when Prometheus asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its current values."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        name = self._service.name
        for family, values in (
            (CounterMetricFamily, counters(self._service)),
            (GaugeMetricFamily, gauges(self._service)),
        ):
            for key, (text, value) in values.items():
                labels, known = _labels(key, name)
                made = family(key, text, labels=labels)
                made.add_metric(known, value)
                yield made
        stats = self._service.stats
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Finished and aborted requests",
            labels=["model_name", "finished_reason"],
        )
        for reason, n in (*stats.ended.items(), ("abort", stats.n_cancelled)):
            ended.add_metric([name, reason], n)
        yield ended
        for prefix in ("llamacpp", "vllm"):
            key = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
            labels, known = _labels(key, name)
            by_place = CounterMetricFamily(
                key, "Accepted draft tokens by position", labels=[*labels, "position"]
            )
            for at, n in enumerate(list(stats.accepted_at)):
                by_place.add_metric([*known, str(at)], n)
            yield by_place
        for key, text, found in (
            ("time_to_first_token_seconds", "Time to first token", stats.time_to_first_token),
            (
                "inter_token_latency_seconds",
                "Time between two tokens of an output",
                stats.inter_token_latency,
            ),
            (
                "e2e_request_latency_seconds",
                "Time from arrival to the end of the output",
                stats.request_latency,
            ),
            ("request_queue_time_seconds", "Time in the queue", stats.queue_time),
            (
                "request_prefill_time_seconds",
                "Time from the first step to the first token",
                stats.prefill_time,
            ),
            (
                "request_decode_time_seconds",
                "Time from the first token to the last",
                stats.decode_time,
            ),
            ("iteration_tokens_total", "Tokens per engine step", stats.step_tokens),
        ):
            labels, known = _labels(f"vllm:{key}", name)
            made_of = HistogramMetricFamily(f"vllm:{key}", text, labels=labels)
            made_of.add_metric(known, buckets=found.buckets, sum_value=found.sum)
            yield made_of


def _labels(key: str, name: str) -> tuple[list[str], list[str]]:
    """Return label names and values of the metric ``key``: vLLM's metrics have the label
    ``model_name`` with the model's ``name``, llama.cpp's have none.
    """
    return (["model_name"], [name]) if key.startswith("vllm:") else ([], [])


Values = dict[str, tuple[str, float]]  # description and value by name


def counters(service: Service) -> Values:
    """Return description and value, by name, of metrics that only grow; Prometheus appends
    ``_total`` to each name.
    """
    t = service.stats
    read = t.n_prompt - t.n_cached + t.n_embedded
    preempted = service.engine.scheduler.queue.n_preempted
    media = service.engine.scheduler.media
    drafts = {
        "num_drafts": ("Verified drafts", t.n_drafts),
        "num_draft_tokens": ("Draft tokens", t.n_drafted),
        "num_accepted_tokens": ("Accepted draft tokens", t.n_accepted),
    }
    return {
        **{
            f"{prefix}:spec_decode_{name}": row
            for prefix in ("llamacpp", "vllm")
            for name, row in drafts.items()
        },
        "llamacpp:prompt_tokens": ("Processed prompt and embedding tokens", read),
        "llamacpp:prompt_tokens_cached": ("Prompt tokens reused from the cache", t.n_cached),
        "llamacpp:prompt_seconds": (
            "Seconds of prompt and embedding processing",
            t.prefill_s + t.embed_s,
        ),
        "llamacpp:tokens_predicted": ("Generated tokens", t.n_written),
        "llamacpp:tokens_predicted_seconds": ("Seconds of generation", t.decode_s),
        "llamacpp:n_decode": ("Engine steps", t.n_steps),
        "vllm:prompt_tokens": (
            "Prompt and embedding tokens, cached ones included",
            t.n_prompt + t.n_embedded,
        ),
        "vllm:generation_tokens": ("Generated tokens", t.n_written),
        "vllm:prefix_cache_queries": ("Prompt tokens looked up in the cache", t.n_prompt),
        "vllm:prefix_cache_hits": ("Prompt tokens found in the cache", t.n_cached),
        "vllm:num_preemptions": ("Preempted requests", preempted),
        "treadle:prompt_tokens_from_files": (
            "Prompt tokens reused from cache files",
            t.n_from_files,
        ),
        "treadle:cancelled": ("Aborted requests", t.n_cancelled),
        "treadle:embedded_tokens": ("Embedding tokens", t.n_embedded),
        "treadle:step_seconds": ("Seconds of engine steps", t.step_s),
        "treadle:media_encoded": ("Encoded pictures and sounds", media.n_encoded),
        "treadle:media_tokens": ("Tokens of encoded pictures and sounds", media.n_rows),
        "treadle:media_seconds": ("Seconds of encoding pictures and sounds", media.seconds),
    }


def gauges(service: Service) -> Values:
    """Return description and value, by name, of metrics that rise and fall."""
    t = service.stats
    outputs = list(service.engine.outputs.values())
    running = sum(output.request.seq is not None for output in outputs)
    read = t.n_prompt - t.n_cached + t.n_embedded
    read_s = t.prefill_s + t.embed_s
    pools = service.model.engine.cache.pools
    return {
        "llamacpp:requests_processing": ("Running requests", running),
        "llamacpp:requests_deferred": ("Waiting requests", len(outputs) - running),
        "llamacpp:prompt_tokens_seconds": (
            "Processed prompt and embedding tokens per second",
            _rate(read, read_s),
        ),
        "llamacpp:n_tokens_max": ("Most tokens of a prompt and its output", t.n_most),
        "process_start_time_seconds": ("Start of the server, in Unix time", service.created),
        "llamacpp:predicted_tokens_seconds": (
            "Generated tokens per second",
            _rate(t.n_written, t.decode_s),
        ),
        "llamacpp:n_busy_slots_per_decode": (
            "Mean requests per engine step",
            _rate(t.n_fed, t.n_steps),
        ),
        "vllm:num_requests_running": ("Running requests", running),
        "vllm:num_requests_waiting": ("Waiting requests", len(outputs) - running),
        "vllm:kv_cache_usage_perc": (
            "Share of KV cache pages in use, 0 to 1",
            max(1 - pool.n_available / pool.n_pages for pool in pools),
        ),
        "treadle:queued_seconds": (
            "Seconds of queued prompt processing",
            service.engine.queued_s(),
        ),
    }


def _rate(n: float, seconds: float) -> Any:
    return n / seconds if seconds else 0.0
