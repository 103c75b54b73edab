"""R1 to R3 of UCB-SpecStop: what rounds cost, how long drafts stand, and where k* leaves 1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from policies.traces import Trace
from serve_app.bench.studies.report import Cell, Report, Table
from serve_app.bench.studies.specstop_rounds import DELAYS_MS, Suite, on_all_cores, suites
from serve_app.bench.studies.specstop_state import ROUNDS, CalibratedState, calibrate

# Table III: k*, its cost in ms per token, and the geometric model's k*, over DELAYS_MS
PAPER_BEST: Mapping[str, tuple[int, ...]] = {
    "Qwen": (1, 1, 1, 1, 1, 2, 3, 4),
    "LLaMA": (1, 1, 1, 1, 1, 1, 4, 7),
}
PAPER_COST_MS: Mapping[str, tuple[float, ...]] = {
    "Qwen": (96.62, 107.02, 138.52, 166.98, 187.19, 223.00, 251.45, 287.68),
    "LLaMA": (98.73, 109.23, 134.12, 159.65, 180.82, 221.63, 251.76, 293.72),
}
PAPER_GEOMETRIC: Mapping[str, tuple[int, ...]] = {
    "Qwen": (1, 1, 1, 1, 1, 2, 2, 3),
    "LLaMA": (1, 1, 1, 1, 1, 2, 3, 3),
}
PAPER_CRITICAL_MS: Mapping[str, float] = {"Qwen": 83.0, "LLaMA": 111.0}
SHOWN = (1, 5, 10)  # lengths of Table I
SHOWN_PREFIX = (1, 3, 5, 7, 10)  # of Table II


def specstop_transition(trace: Trace, rounds: tuple[int, int, int] = ROUNDS) -> Report:
    """Tables I, II and III, on the published suites and on the trace."""
    of = suites(trace)
    states: list[CalibratedState] = on_all_cores(
        calibrate, [(suite, DELAYS_MS, rounds) for suite in of]
    )
    pairs = list(zip(of, states, strict=True))
    return Report(
        name="specstop-transition",
        title="UCB-SpecStop, R1 to R3: costs, acceptance, and the critical delay",
        setup=(
            f"Rounds of fixed draft lengths on the tuning split: {rounds[0]} of each length for "
            f"R1, {rounds[1]} of length 10 for R2, {rounds[2]} of each length and injected one-way "
            "delay for R3. All lengths and delays meet the same luck, or the same prompts. The "
            "published suites are the paper's Tables I and II played back, with acceptance by "
            "position or geometric at the tail's rate; the trace has 36 ms per draft, 30 ms per "
            "verification and 10 ms of base round trip."
        ),
        tables=(_costs(pairs), _acceptance(pairs), _transition(pairs), _critical(pairs)),
        remarks=_remarks(states),
        figures={"states": [json.loads(state.write()) for state in states]},
    )


def _costs(pairs: Sequence[tuple[Suite, CalibratedState]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for suite, state in pairs:
        costs = state.measured()
        draft_ms = dict(zip(costs.draft_lens, costs.draft_ms_per_token, strict=True))
        verify_ms = dict(zip(costs.draft_lens, costs.verify_ms_per_token, strict=True))
        mean = state.mean_costs()
        own: list[Cell] = [mean.draft_ms, mean.verify_ms_per_token]
        own += [draft_ms[k] for k in SHOWN] + [verify_ms[k] for k in SHOWN] + [costs.rtt_ms]
        rows.append((suite.name, "measured", *own))
        if suite.model is not None and not suite.geometric:
            paper = suite.model
            published: list[Cell] = [paper.mean_draft_ms, paper.mean_verify_ms]
            published += [paper.draft_ms_per_token[k] for k in SHOWN]
            published += [paper.verify_ms_per_token[k] for k in SHOWN]
            rows.append((suite.name, "paper", *published, paper.base_rtt_ms))
    by_len = [f"{cost}({k})" for cost in ("c_d", "c_v") for k in SHOWN]
    columns = ("suite", "", "mean c_d", "mean c_v", *by_len, "RTT")
    return Table("Table I (R1), milliseconds per token", columns, tuple(rows))


def _acceptance(pairs: Sequence[tuple[Suite, CalibratedState]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for suite, state in pairs:
        known = state.accepted()
        rows.append(
            (suite.name, "measured", *(known.prefix[k - 1] for k in SHOWN_PREFIX), known.tail_rate)
        )
        if suite.model is not None and not suite.geometric:
            paper = suite.model
            rows.append(
                (suite.name, "paper", *(paper.prefix[k] for k in SHOWN_PREFIX), paper.tail_rate)
            )
    columns = ("suite", "", *(f"q({k})" for k in SHOWN_PREFIX), "tail's rate")
    return Table("Table II (R2), probability that the first k drafts stand", columns, tuple(rows))


def _transition(pairs: Sequence[tuple[Suite, CalibratedState]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for suite, state in pairs:
        name = suite.name
        assert state.best is not None
        rows.append((name, "k* measured", *state.best.draft_lens))
        if name in PAPER_BEST:
            rows.append((name, "k* paper", *PAPER_BEST[name]))
        rows.append((name, "k* by the curves of R1 and R2", *map(state.empirical_len, DELAYS_MS)))
        rows.append((name, "C measured, ms/token", *state.best.cost_ms))
        if name in PAPER_BEST:
            rows.append((name, "C paper", *PAPER_COST_MS[name]))
        rows.append((name, "k* geometric", *map(state.theory_len, DELAYS_MS)))
        if name in PAPER_BEST:
            rows.append((name, "k* geometric, paper", *PAPER_GEOMETRIC[name]))
        rows.append((name, "k* geometric, costs by k", *map(state.calibrated_len, DELAYS_MS)))
    columns = ("suite", "", *(f"d = {delay_ms:g}" for delay_ms in DELAYS_MS))
    return Table("Table III (R3), by injected one-way delay in ms", columns, tuple(rows))


def _critical(pairs: Sequence[tuple[Suite, CalibratedState]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            suite.name,
            first_jump_ms(state),
            max(0.0, state.critical_ms()),
            max(0.0, state.geometric_critical_ms()),
            PAPER_CRITICAL_MS.get(suite.name),
        )
        for suite, state in pairs
    ]
    columns = ("suite", "first d with k* >= 2", "by the curves", "by Eq. 24", "paper")
    return Table("Critical one-way delay, injected, ms", columns, tuple(rows))


def first_jump_ms(state: CalibratedState) -> float | None:
    """The first of R3's delays at which a longer draft than one was best."""
    assert state.best is not None
    jumps = zip(state.best.one_way_ms, state.best.draft_lens, strict=True)
    return next((delay_ms for delay_ms, best in jumps if best > 1), None)


def _against_paper(state: CalibratedState) -> list[str]:
    """Of a published suite."""
    name = state.suite
    assert state.best is not None
    paired = zip(state.best.cost_ms, PAPER_COST_MS[name], strict=True)
    off = [ours / theirs - 1.0 for ours, theirs in paired]
    return [
        f"{name}: the costs are {100 * min(off):+.1f} to {100 * max(off):+.1f} % off the "
        "paper's, whose rounds carry the scatter of a testbed and of 300 rounds; ours carry "
        "the latter only.",
        f"{name}: the curves of R1 and R2 put d_c at {state.critical_ms():.0f} ms and Eq. 24 "
        f"with its averages at {state.geometric_critical_ms():.0f} ms; the paper reports "
        f"{PAPER_CRITICAL_MS[name]:g} ms, the first point of its grid with k* >= 2. Near d_c "
        "the costs of several lengths are within a few percent, so 300 rounds cannot tell "
        "them apart; the same holds for our measured k*.",
    ]


def _remarks(states: Sequence[CalibratedState]) -> list[str]:
    by_name = {state.suite: state for state in states}
    falls = [
        state.suite
        for state in states
        if state.best is not None and sorted(state.best.draft_lens) != list(state.best.draft_lens)
    ]
    remarks = [
        "k* falls with the delay nowhere, as Theorem 2 says."
        if not falls
        else f"k* falls with the delay on {', '.join(falls)}, against Theorem 2."
    ]
    for name in PAPER_COST_MS:
        remarks += _against_paper(by_name[name])
    return [
        *remarks,
        "Published c_v(k) times k + 1 is the same for all k: a forward over up to eleven ids takes "
        "one time. The theory's (k + 1)·c_v with an averaged c_v prices long drafts too high, and "
        "so does an averaged c_d; with costs by k the geometric model drafts longer.",
        "A constant rate fitted to the tail (k >= 2) promises far more of the first draft than the "
        "head keeps (0.83 against 0.46, 0.85 against 0.38 in Table II), which is why the "
        "geometric suites are so much cheaper, and their d_c lower, than those by position.",
        "The better the draft model and the cheaper a draft, the lower is d_c: compare the trace's "
        "data sets with the published suites, whose drafts take two to three times as long and "
        "mostly fall at once.",
    ]
