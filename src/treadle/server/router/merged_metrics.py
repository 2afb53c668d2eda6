"""``/metrics`` of several engines as one text: each sample is labelled with its model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from treadle.base.fast_classes import dataclass
from treadle.server.router.pool import EnginePool
from treadle.server.router.served_model import ServedModel

SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)", re.ASCII)
COMMENT = re.compile(r"# (HELP|TYPE) (\S+) ?(.*)")
STATES = {"unloaded": 0, "sleeping": 1, "downloading": 2, "loading": 3, "loaded": 4}


@dataclass(eq=False)
class MetricFamily:
    """One metric of all engines: its comment lines by kind (HELP, TYPE), and its sample lines."""

    comments: dict[str, str]
    samples: list[str]


def merge(texts: Mapping[str, str]) -> str:
    """Return one text of metrics from ``texts``, an engine's text by model: a metric's comments
    once, and its samples with the label ``model``.
    """
    families: dict[str, MetricFamily] = {}
    for model, text in texts.items():
        current = ""
        for line in text.splitlines():
            comment = COMMENT.fullmatch(line)
            if comment:
                current = comment[2]
                family = families.setdefault(current, MetricFamily({}, []))
                family.comments.setdefault(comment[1], line)
                continue
            sample = SAMPLE.fullmatch(line)
            if sample:
                family = families.setdefault(current, MetricFamily({}, []))
                family.samples.append(labelled(sample[1], sample[2] or "", model, sample[3]))
    lines: list[str] = []
    for family in families.values():
        lines += [*family.comments.values(), *family.samples]
    return "\n".join(lines) + "\n" if lines else ""


def labelled(name: str, labels: str, model: str, value: str) -> str:
    """Return a sample line of the metric ``name`` with ``value``, and the label ``model`` added.
    ``labels``: the sample's other labels, as text.
    """
    more = f",{labels}" if labels else ""
    return f'{name}{{model="{escaped(model)}"{more}}} {value}'


def escaped(text: str) -> str:
    """Return a label's value, escaped as Prometheus requires."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def router_metrics(pool: EnginePool, models: Iterable[ServedModel]) -> str:
    """Return the router's own metrics of ``models`` as Prometheus' text."""
    rows: list[tuple[str, str, str, dict[str, float]]] = []
    known = list(models)
    slots = {model.name: pool.slots.get(model.name) for model in known}
    state = {model.name: float(STATES[pool.state(model)]) for model in known}
    told = ", ".join(f"{number} {name}" for name, number in STATES.items())
    rows.append(("router_model_state", "gauge", f"State of a model: {told}", state))
    for name, kind, text, attribute in (
        ("router_model_memory_bytes", "gauge", "Memory that is reserved", "reserved"),
        ("router_loads", "counter", "Loads of a model", "n_loads"),
        ("router_crashes", "counter", "Engines that ended unexpectedly", "n_crashes"),
        ("router_load_seconds", "gauge", "Seconds of the last load", "load_s"),
    ):
        values = {name: float(getattr(s, attribute)) for name, s in slots.items() if s}
        rows.append((name, kind, text, values))
    engines = {model.name: pool.engine(model) for model in known}
    running = {name: float(e.n_running) for name, e in engines.items() if e}
    rows.append(("router_calls_running", "gauge", "Calls that an engine answers", running))
    lines: list[str] = []
    for name, kind, text, values in rows:
        full = f"treadle:{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [labelled(full, "", model, repr(value)) for model, value in values.items()]
    return "\n".join(lines) + "\n"
