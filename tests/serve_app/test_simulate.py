"""`outrider simulate`: its contract, its files, and what its rows mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from policies.methods import METHODS
from policies.scenarios import SCENARIOS, edge
from policies.traces import read, write
from serve_app import cli
from serve_app.bench.trials import (
    EDGE_ONLY,
    SPLITS,
    TUNABLE,
    Workload,
    candidates,
    clairvoyant_tpt_ms,
    compare,
    try_out,
)
from serve_app.scenario_file import ScenarioError, load
from serve_app.traces import SHIPPED
from tests.policies.traces import toy_trace

ROW = {
    *("dataset", "method", "tpt_ms", "navs_per_token", "verified_per_token"),
    *("bytes_up_per_token", "speedup_vs_vanilla", "settings"),
}
SCENARIO = """
draft_ms: 20
verify_ms: 50
link:
  - {rtt_ms: 40, uplink_mbit_per_s: 10, lasts_s: 5}
  - {rtt_ms: 40, uplink_mbit_per_s: 80, jitter_ms: 3, lasts_s: 5}
messages: truncated
edge_target_ms: 60
"""


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.npz"
    write(toy_trace(), path)
    return path


def simulate(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli.app, ["simulate", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.strip().splitlines()) == 1
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_json_line_keeps_its_contract(trace_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SCENARIO)
    result = simulate("--trace", str(trace_file), "--scenario", str(file))
    assert set(result) == {"scenario", "clairvoyant_tpt_ms", "rows"}
    assert set(result["clairvoyant_tpt_ms"]) == {"toy"}
    rows = {row["method"]: row for row in result["rows"]}
    assert set(rows) == {*METHODS, EDGE_ONLY}
    for name, row in rows.items():
        assert set(row) - {"front"} == ROW
        assert ("front" in row) == (name in TUNABLE)
        assert row["tpt_ms"] > 0.0
    assert rows["vanilla"]["speedup_vs_vanilla"] == 1.0
    assert rows[EDGE_ONLY]["tpt_ms"] == 60.0
    front = rows["pipesd"]["front"]
    assert len(front) == 36
    setting, tpt_ms, navs = next(f for f in front if f[0] == rows["pipesd"]["settings"])
    assert (tpt_ms, navs) == (rows["pipesd"]["tpt_ms"], rows["pipesd"]["navs_per_token"])
    assert set(setting) == {"sequence_threshold", "token_threshold"}


def test_a_row_is_the_setting_that_was_fastest_on_the_other_split(trace_file: Path) -> None:
    scenario = edge(36.0, 50.0)
    (row,) = compare(scenario, read(trace_file), ["vanilla"])
    assert row.best.tuning.tpt_ms == min(trial.tuning.tpt_ms for trial in row.trials)
    workload = Workload("toy", read(trace_file))
    again = [try_out(scenario, workload, each) for each in candidates("vanilla")]
    assert [t.evaluation.tpt_ms for t in again] == [t.evaluation.tpt_ms for t in row.trials]


def test_ours_takes_no_more_of_the_verifier_than_pipesd_on_the_tuning_split(
    trace_file: Path,
) -> None:
    rows = compare(edge(36.0, 300.0), read(trace_file), ["pipesd", "outrider"])
    pipesd, ours = rows
    assert ours.best.tuning.navs_per_token <= pipesd.best.tuning.navs_per_token


def test_a_synthetic_scenario_has_a_data_set_of_its_own(trace_file: Path) -> None:
    name = "specstop-qwen"
    result = simulate(
        "--trace", str(trace_file), "--scenario", name, "--method", "vanilla", "--method", "ucb"
    )
    assert {row["dataset"] for row in result["rows"]} == {"synthetic"}
    assert [row["method"] for row in result["rows"]] == ["vanilla", "ucb", EDGE_ONLY]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("draft_ms: 20", "link"),
        (SCENARIO + "colour: red", "colour"),
        (SCENARIO.replace("verify_ms: 50", "verify_ms: -1"), "verify_ms"),
        (SCENARIO.replace("draft_ms: 20", "draft_ms: [20, .nan]"), "draft_ms"),
        (SCENARIO.replace("truncated", "some"), "messages"),
        (SCENARIO.replace("rtt_ms: 40", "rtt_ms: forty"), "rtt_ms"),
        (SCENARIO + "rates: [2]", "rates"),
        ("[", "line 1"),
        ("- 1", "the file"),
    ],
)
def test_a_malformed_scenario_names_its_field(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ScenarioError, match=named):
        load(str(path))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--scenario", "nowhere"], "rtt300"),
        (["--trace", "pyproject.toml"], "not a trace"),
        (["--method", "mine"], "outrider-p0"),
    ],
)
def test_a_wrong_argument_is_told_without_a_traceback(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(cli.app, ["simulate", *arguments], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert named in done.output
    assert "Traceback" not in done.output


# ---- the trace that ships


def test_the_shipped_trace_is_the_default_pairs_over_both_splits() -> None:
    """DESIGN §9: 93 % agreement on HumanEval; the splits are of other prompts, and hold no text."""
    trace = read(SHIPPED)
    assert SHIPPED.stat().st_size < 2_000_000
    assert trace.draft.sha256.startswith("1d9614638d18")
    assert trace.target.sha256.startswith("cc324af070c2")
    for dataset in ("humaneval", "gsm8k"):
        for split in SPLITS:
            prompts = trace.of(dataset, split)
            assert len(prompts) == 20
            tokens = sum(prompt.target_ids.size for prompt in prompts)
            agreed = 1.0 - sum(prompt.mismatches.size for prompt in prompts) / tokens
            assert tokens > 2_400
            assert 0.88 < agreed < 0.97


@pytest.mark.parametrize("name", ["rtt50", "npu"])
def test_the_clairvoyant_bound_is_below_every_method_that_drafts(name: str) -> None:
    trace = read(SHIPPED)
    for dataset in trace.datasets:
        workload = Workload(dataset, trace)
        bound_ms = clairvoyant_tpt_ms(SCENARIOS[name], workload)
        for method in ("outrider-p0", "pipesd-fixed"):
            candidate = candidates(method)[0]
            assert try_out(SCENARIOS[name], workload, candidate).evaluation.tpt_ms > bound_ms
