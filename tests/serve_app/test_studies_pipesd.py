"""PipeSD's tables: what each study claims by its shape, on small traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from policies.methods import METHODS
from policies.player import Player
from policies.scenarios import SCENARIOS
from policies.thresholds import Setting
from serve_app.bench.studies import STUDIES, study
from serve_app.bench.studies.pipesd import (
    PAPER_VOCABULARY,
    Comparison,
    comparisons,
    paper_sized,
    pipesd_bandwidth,
    pipesd_table1_ids,
)
from serve_app.bench.studies.pipesd_clients import pipesd_clients
from serve_app.bench.studies.pipesd_dynamic import (
    FIXED,
    SCENARIO,
    SELF_TUNED,
    course,
    pipesd_dynamic,
)
from serve_app.bench.studies.pipesd_overhead import pipesd_overhead
from serve_app.bench.studies.pipesd_parts import (
    MESSAGES,
    PAPER_ABLATION,
    pipesd_ablation,
    pipesd_diagnostics,
)
from serve_app.bench.studies.pipesd_search import SEARCHES, pipesd_search, search, tpt_ms
from serve_app.bench.studies.report import Report
from serve_app.bench.trials import DRAFT_LENS, SPLITS, Workload
from tests.policies.traces import toy_trace

ONE_KIND = {"ids only": MESSAGES["ids only"]}


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("pipesd")])
def test_every_study_is_found_by_its_name(name: str) -> None:
    assert callable(study(name))


def shown(report: Report) -> dict:
    """Its figures as a program reads them; the page must have every table."""
    page = report.markdown()
    for table in report.tables:
        assert table.caption in page
        assert all(len(row) == len(table.columns) for row in table.rows)
    figures: dict = json.loads(report.json_line())
    assert figures["study"] == report.name
    assert report.name in STUDIES
    return figures


def test_paper_sized_messages_are_a_fifth_of_ours() -> None:
    ours, paper = SCENARIOS["laptop"], paper_sized(SCENARIOS["laptop"])
    assert paper.wire.draft_bytes == 2.0 * PAPER_VOCABULARY < ours.wire.draft_bytes / 4.5
    assert paper.uplink == ours.uplink
    assert paper_sized(SCENARIOS["laptop-ids"]).uplink.one_request_at_a_time


def test_table1_holds_pipesd_against_every_rival_in_the_same_run() -> None:
    report = pipesd_table1_ids(toy_trace(), ["laptop"])
    (row,) = shown(report)["rows"]
    assert set(row["tpt_ms"]) == {"vanilla", "hsl", "edgellm", "pipesd"}
    over_vanilla = row["tpt_ms"]["vanilla"] / row["tpt_ms"]["pipesd"]
    assert report.tables[0].rows[0][3] == pytest.approx(over_vanilla)
    assert [line[0] for line in report.tables[1].rows][:3] == ["vanilla", "hsl", "edgellm"]


def test_vanilla_as_in_the_paper_is_one_of_the_settings_tried() -> None:
    trace = toy_trace()
    (each,) = comparisons(trace, ONE_KIND, ("vanilla", "pipesd"))
    assert isinstance(each, Comparison)
    assert each.paper_vanilla.candidate.method.draft_len == 6
    assert len(each.rows["vanilla"].trials) == len(DRAFT_LENS)
    best = min(trial.tuning.tpt_ms for trial in each.rows["vanilla"].trials)
    assert each.rows["vanilla"].best.tuning.tpt_ms == best


def test_a_wider_uplink_makes_nobody_slower() -> None:
    narrow, wide = shown(pipesd_bandwidth(toy_trace(), (10.0, 80.0)))["rows"]
    assert all(wide["tpt_ms"][name] <= narrow["tpt_ms"][name] for name in ("vanilla", "hsl"))


def test_the_ablation_has_vanilla_at_one_and_every_variant() -> None:
    report = pipesd_ablation(toy_trace(), ONE_KIND)
    rows = {row[0]: row for row in report.tables[0].rows}
    assert list(rows) == list(PAPER_ABLATION)
    assert rows["vanilla"][3] == 1.0
    assert set(shown(report)["ids only/toy"]["tpt_ms"]) == set(PAPER_ABLATION)


def test_acceptance_by_position_is_of_drafts_that_were_judged() -> None:
    trace = toy_trace(prompts=4, length=32)
    report = pipesd_diagnostics(trace, ONE_KIND)
    for figures in shown(report)["ids only/toy"].values():
        assert 0.0 < figures["accepted_of_drafted"] <= figures["accepted_of_judged"] <= 1.0
    shares = [cell for row in report.tables[1].rows for cell in row[1:] if cell is not None]
    assert shares
    assert all(0.0 < share <= 1.0 for share in shares)


def test_a_search_is_held_to_its_budget_and_judged_on_the_other_split() -> None:
    trace = toy_trace()
    for kind in SEARCHES:
        found = search(trace, "toy", kind, 4, 1)
        assert found.evaluation_ms == tpt_ms(trace, "toy", "evaluate", found.setting)


def test_all_searches_meet_the_same_surface() -> None:
    report = pipesd_search(toy_trace(), seeds=(0, 1), budgets=(2,), thresholds=(0.3, 0.7))
    figures = shown(report)
    assert len(figures["searches"]) == 2 + 2 + 1
    cell = next(c for c in figures["surface"] if c[1:4] == ["evaluate", 0.3, 0.7])
    assert cell[4] == tpt_ms(toy_trace(), "toy", "evaluate", Setting(0.3, 0.7))


def test_every_part_of_control_takes_some_time_and_less_than_generating() -> None:
    (run,) = shown(pipesd_overhead(toy_trace(prompts=4, length=64), repeats=1))["toy"]
    shares = [value for name, value in run.items() if name.endswith("percent")]
    assert len(shares) == 3
    assert all(0.0 < share < 100.0 for share in shares)


def test_one_client_alone_never_waits_under_one_nav_at_a_time_and_many_do() -> None:
    figures = shown(pipesd_clients(toy_trace(prompts=4), clients=(1, 4), repeats=1))["queues"]
    queues = {(each["name"], each["clients"]): each for each in figures}
    assert queues["pipesd", 1]["mean_wait_ms"] == queues["vanilla", 1]["mean_wait_ms"] == 0.0
    for name in ("pipesd", "vanilla", "pipesd-fixed", "outrider"):
        assert queues[name, 1]["busy"] < queues[name, 4]["busy"] <= 1.0
        assert queues[name, 4]["mean_wait_ms"] > 0.0
        assert queues[name, 4]["p95_wait_ms"] <= SCENARIOS["laptop-ids"].verify.verify_ms


def test_the_course_of_the_thresholds_starts_where_the_fixed_ones_stay() -> None:
    report = pipesd_dynamic(toy_trace(prompts=6, length=64), seeds=(0,), thresholds=(0.3, 0.7))
    figures = shown(report)
    assert [run["thresholds"] for run in figures["runs"]] == [SELF_TUNED, FIXED]
    assert all(0.0 <= run["suboptimal_share"] <= 1.0 for run in figures["runs"])
    seconds = [row[0] for row in figures["series"]]
    assert seconds == sorted(seconds)
    assert figures["series"][0][2:4] == [0.5, 0.5]


def test_recording_the_course_changes_nothing() -> None:
    trace = toy_trace()
    recorded = course(trace, "toy", FIXED, 0).evaluation
    player = Player(SCENARIO, replace(METHODS["pipesd"], learner="none"))
    for split in SPLITS:
        played = player.play(Workload("toy", trace).pairs(SCENARIO, split), trace.end_ids)
    assert played == recorded
