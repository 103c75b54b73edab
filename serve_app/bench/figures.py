"""The figures of the endpoint benchmark.

A time is the median over requests, with quartiles; the ITL is the 95th percentile over all gaps of
all requests; rates are ratios of sums. What has no values is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from serve_app.bench.comparison import Comparison
from serve_app.bench.measure import Pair, Run

COLUMNS = (
    *("method", "TTFT ms", "TPT ms", "TPOT ms", "ITL p95 ms"),
    *("acceptance", "length", "NAVs/token", "bytes/token"),
)


@dataclass(frozen=True, slots=True)
class Quartiles:
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}–{self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Figures:
    """One method over all its requests."""

    ttft_ms: Quartiles
    tpt_ms: Quartiles
    tpot_ms: Quartiles | None  # None if every answer was a single token
    itl_p95_ms: float | None
    acceptance_rate: float | None  # accepted / drafted
    acceptance_len: float | None  # committed tokens per NAV
    acceptance_by_position: tuple[float | None, ...]  # accepted / judged, by position in the NAV
    navs_per_token: float
    bytes_per_token: float  # both directions


def figures(runs: Sequence[Run]) -> Figures:
    """Of at least one run."""
    reports = [run.report for run in runs]
    num_tokens = sum(len(run.ids) for run in runs)
    num_navs = sum(report.navs for report in reports)
    num_bytes = sum(report.uplink_bytes + report.downlink_bytes for report in reports)
    accepted = sum(report.accepted for report in reports)
    committed = accepted + sum(report.recovered + report.bonus for report in reports)
    accepted_at = _sums(report.accepted_at for report in reports)
    judged_at = _sums(report.judged_at for report in reports)
    tpots = [run.tpot_ms for run in runs if run.tpot_ms is not None]
    gaps = [gap for run in runs for gap in run.itl_ms]
    return Figures(
        ttft_ms=quartiles([run.ttft_ms for run in runs]),
        tpt_ms=quartiles([run.tpt_ms for run in runs]),
        tpot_ms=quartiles(tpots) if tpots else None,
        itl_p95_ms=_percentiles(gaps, 20)[-1] if gaps else None,
        acceptance_rate=_ratio(accepted, sum(report.drafted for report in reports)),
        acceptance_len=_ratio(committed, num_navs),
        acceptance_by_position=tuple(
            _ratio(stood, judged)
            for stood, judged in zip_longest(accepted_at, judged_at, fillvalue=0)
        ),
        navs_per_token=num_navs / num_tokens,
        bytes_per_token=num_bytes / num_tokens,
    )


def speedup(pairs: Sequence[Pair]) -> Quartiles:
    """Over prompts: TPT of the target alone / TPT with speculation; above 1 is faster."""
    return quartiles([pair.off.tpt_ms / pair.speculative.tpt_ms for pair in pairs])


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of at least one value, interpolated between the values."""
    return Quartiles(*_percentiles(values, 4))


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The benchmark's result as JSON values."""
    off, speculative = _by_method(pairs)
    faster, judged = speedup(pairs), _compared(pairs)
    return {
        "requests": len(pairs),
        "tokens": sum(len(pair.speculative.ids) for pair in pairs),
        "ttft_ms": speculative.ttft_ms.median,
        "tpt_ms": speculative.tpt_ms.median,
        "tpot_ms": speculative.tpot_ms and speculative.tpot_ms.median,
        "itl_p95_ms": speculative.itl_p95_ms,
        "acceptance_rate": speculative.acceptance_rate,
        "acceptance_len": speculative.acceptance_len,
        "acceptance_by_position": list(speculative.acceptance_by_position),
        "navs_per_token": speculative.navs_per_token,
        "bytes_per_token": speculative.bytes_per_token,
        "baseline_ttft_ms": off.ttft_ms.median,
        "baseline_tpt_ms": off.tpt_ms.median,
        "baseline_tpot_ms": off.tpot_ms and off.tpot_ms.median,
        "baseline_itl_p95_ms": off.itl_p95_ms,
        "speedup": faster.median,
        "speedup_quartiles": [faster.low, faster.high],
        "compared": judged.compared,
        "identical": judged.identical,
        "near_ties": judged.near_ties,
        "mismatches": judged.mismatches,
        "degraded": _degraded(pairs),
    }


def table(pairs: Sequence[Pair]) -> str:
    """The benchmark's result for people."""
    off, speculative = _by_method(pairs)
    cells = [COLUMNS, _cells("off", off), _cells("speculative", speculative)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    rows = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    positions = " ".join(_cell(rate, 2) for rate in speculative.acceptance_by_position)
    faster, judged = speedup(pairs), _compared(pairs)
    return "\n".join(
        [
            *rows,
            f"medians over {len(pairs)} requests (quartiles); ITL: all gaps between chunks with "
            "tokens, a chunk may bring several",
            f"acceptance by position in the NAV: {positions or '-'}",
            f"{judged.compared} tokens against the target alone: {judged.identical} identical, "
            f"{judged.near_ties} near ties, {judged.mismatches} mismatches; "
            f"{_degraded(pairs)} requests degraded",
            f"speedup, median over the prompts of TPT off / TPT speculative: {faster.median:.2f} "
            f"({faster.low:.2f}–{faster.high:.2f})",
        ]
    )


def _by_method(pairs: Sequence[Pair]) -> tuple[Figures, Figures]:
    off = figures([pair.off for pair in pairs])
    return off, figures([pair.speculative for pair in pairs])


def _compared(pairs: Iterable[Pair]) -> Comparison:
    return sum((pair.comparison for pair in pairs), Comparison())


def _degraded(pairs: Iterable[Pair]) -> int:
    return sum(pair.speculative.report.mode == "degraded" for pair in pairs)


def _cells(method: str, row: Figures) -> tuple[str, ...]:
    return (
        *(method, str(row.ttft_ms), str(row.tpt_ms), str(row.tpot_ms or "-")),
        *(_cell(row.itl_p95_ms, 1), _cell(row.acceptance_rate, 3), _cell(row.acceptance_len, 2)),
        *(_cell(row.navs_per_token, 3), _cell(row.bytes_per_token, 1)),
    )


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percentiles(values: Sequence[float], n: int) -> list[float]:
    if len(values) == 1:
        return list(values) * (n - 1)
    return statistics.quantiles(values, n=n, method="inclusive")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sums(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
