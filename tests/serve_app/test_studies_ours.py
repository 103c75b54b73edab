"""The studies of ours: fronts that are fronts, targets with their baselines, regrets by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.crossover import Mode
from policies.scenarios import SCENARIOS
from serve_app.bench.studies import STUDIES, study
from serve_app.bench.studies.modes import PLAYED, Spot, crossover
from serve_app.bench.studies.ours import TARGETS, front, pareto
from serve_app.bench.studies.report import Report, Table
from serve_app.bench.trials import Workload, candidates, clairvoyant_tpt_ms, compare
from tests.policies.traces import toy_trace

METHODS = ("pipesd", "vanilla", "outrider", "outrider-p0")


@pytest.fixture(scope="module")
def report() -> Report:
    return pareto(toy_trace(), ["rtt300"], METHODS)


@pytest.fixture(scope="module")
def modes() -> Report:
    return crossover(toy_trace(prompts=6, length=48), [50.0], [10.0, 72.0], [20.0, 120.0])


def entries(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.mark.parametrize("name", ["pareto", "crossover"])
def test_the_studies_are_commands(name: str) -> None:
    assert name in STUDIES
    assert study(name).__name__ == name


def test_a_front_keeps_exactly_the_settings_that_no_other_beats() -> None:
    [row] = compare(SCENARIOS["rtt300"], toy_trace(), ["outrider"])
    for measure in ("navs_per_token", "verified_per_token"):
        points = [(getattr(t.evaluation, measure), t.evaluation.tpt_ms) for t in row.trials]
        expected = {
            (cost, ms)
            for cost, ms in points
            if not any((c <= cost and m <= ms) and (c, m) != (cost, ms) for c, m in points)
        }
        found = front(row, lambda figures, name=measure: getattr(figures, name))
        assert {(cost, ms) for _, ms, cost in found} == expected
        assert len(found) == len(expected)


def test_every_target_of_the_issue_has_its_row_and_verdict(report: Report) -> None:
    targets = entries(report.tables[0])
    assert [row["at most"] for row in targets] == list(TARGETS["rtt300"])
    for row in targets:
        ratio = row["ratio"]
        if row["ms"] is None:
            assert ratio is None
        else:
            assert ratio == pytest.approx(row["ms"] / row["against, ms"])
        assert (row[""] == "reached") == (ratio is not None and ratio <= row["at most"])
    missed = [row for row in targets if row[""] == "missed"]
    assert sum(remark.startswith("Missed") for remark in report.remarks) == len(missed)


def test_ours_is_held_against_pipesd_tuned_and_the_bound_of_the_same_run(report: Report) -> None:
    trace, scenario = toy_trace(), SCENARIOS["rtt300"]
    rival, ours = compare(scenario, trace, ["pipesd", "outrider"])
    fastest = min(rival.trials, key=lambda trial: trial.tuning.tpt_ms).evaluation
    allowed = [
        trial.evaluation.tpt_ms
        for trial in ours.trials
        if trial.evaluation.navs_per_token <= fastest.navs_per_token
    ]
    equal, _, free = entries(report.tables[0])
    assert equal["against, ms"] == fastest.tpt_ms
    assert equal["ms"] == min(allowed, default=None)
    assert free["against, ms"] == clairvoyant_tpt_ms(scenario, Workload("toy", trace))


def test_each_method_has_a_row_that_a_higher_limit_never_makes_slower(report: Report) -> None:
    table = report.tables[1]
    assert [row[0] for row in table.rows] == list(METHODS)
    for row in entries(table):
        for unit in ("NAVs", "ids"):
            by_limit = [row[name] for name in table.columns if name.endswith(unit)]
            found = [ms for ms in by_limit if ms is not None]
            assert by_limit[len(by_limit) - len(found) :] == found
            assert found == sorted(found, reverse=True)
    fronts = report.figures["rtt300/toy"]["fronts"]
    assert len(fronts["outrider-p0"]["navs"]) == len(candidates("outrider-p0")) == 1


def test_a_scenario_without_targets_has_fronts_only() -> None:
    report = pareto(toy_trace(), ["cloud70b"], ("pipesd", "outrider", "outrider-p0"))
    assert report.tables[0].rows == ()
    assert report.remarks == []


def test_a_regret_is_over_the_best_of_the_modes_that_there_were() -> None:
    taken_ms = {Mode.CLOUD_ONLY: 30.0, Mode.COLLABORATIVE: 20.0, Mode.EDGE_ONLY: 10.0}
    cloud, both = Mode.CLOUD_ONLY, Mode.COLLABORATIVE
    spot = Spot("toy", 50.0, 10.0, 30.0, taken_ms, both, cloud, 25.0, both)
    assert spot.regret == 2.0
    assert spot.regret_in_cloud == 1.5
    assert spot.auto_regret == 1.25
    assert spot.best_in_cloud is both


def test_every_place_of_the_grid_has_all_modes_and_choices(modes: Report) -> None:
    spots = modes.figures["spots"]
    assert len(spots) == len(modes.tables[1].rows) == 4
    for spot in spots:
        assert set(spot["tpt_ms"]) == set(Mode)
        assert spot["tpt_ms"][Mode.EDGE_ONLY] == pytest.approx(2.3 * spot["draft_ms"])
        assert spot["tpt_ms"][Mode.CLOUD_ONLY] >= spot["verify_ms"]
        assert spot["predicted_in_cloud"] in PLAYED
        assert min(spot["regret"], spot["regret_in_cloud"]) >= 1.0
    worst = max(spot["regret"] for spot in spots)
    assert modes.figures["regret"]["predicted, of three modes"]["worst"] == worst


def test_where_modes_are_far_apart_the_predicted_one_is_the_best(modes: Report) -> None:
    """A draft of 72 ms against the target alone at 20, and a target at 120 against drafts of 10."""
    found = {
        (s["draft_ms"], s["verify_ms"]): s["predicted_in_cloud"] for s in modes.figures["spots"]
    }
    assert found[72.0, 20.0] == Mode.CLOUD_ONLY
    assert found[10.0, 120.0] == Mode.COLLABORATIVE


def test_both_reports_are_a_section_and_a_line_of_json(report: Report, modes: Report) -> None:
    for each in (report, modes):
        assert f"`outrider study {each.name}`" in each.markdown()
        assert json.loads(each.json_line())["study"] == each.name
