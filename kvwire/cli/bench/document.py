"""A benchmark as a JSON document: everything that was measured, and on what."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import kvwire
from kvwire.cli.bench.case import Benchmark, Samples
from kvwire.cli.bench.summary import Summary, compare
from kvwire.cli.bench.turns import CaseResult


def document(
    benchmark: Benchmark, findings: Sequence[CaseResult], settings: dict[str, Any]
) -> dict[str, Any]:
    """The document; times are seconds, rates bytes a second.

    Args:
        benchmark: What was run.
        findings: What was found.
        settings: How the command was called.
    """
    return {
        "benchmark": benchmark.name,
        "kvwire": kvwire.__version__,
        "settings": settings,
        "machine": machine(),
        "cases": [_case(finding) for finding in findings],
        "contenders": {c.name: dict(c.facts()) for c in benchmark.contenders},
        "missing": [asdict(absent) for absent in benchmark.missing],
        "notes": list(benchmark.notes),
    }


def as_text(found: dict[str, Any]) -> str:
    """The document as JSON text."""
    return json.dumps(found, indent=1) + "\n"


def machine() -> dict[str, Any]:
    """Where it ran, and how busy that was."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }


def _case(finding: CaseResult) -> dict[str, Any]:
    case = finding.case
    return {
        "name": case.name,
        "group": case.group,
        "work": asdict(case.work),
        "unit": "s" if case.unit.less_is_better else "B/s",
        "target": case.target,
        **asdict(compare(finding)),
        "contenders": {
            name: samples_of(samples) for name, samples in finding.samples.items()
        },
        "failures": finding.failures,
    }


def samples_of(samples: Samples) -> dict[str, Any]:
    """What one contender did in one case."""
    return {
        **asdict(Summary.of(samples.values)),
        "cpu_s_per_gib": samples.cpu_s_per_gib,
        "sides_cpu_s_per_gib": samples.sides_cpu_s_per_gib,
        "rounds": [list(sample.values) for sample in samples.rounds],
    }
