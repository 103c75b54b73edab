"""`outrider plan` from a scenario and from a running system, and the endpoint that it asks."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from policies.costs import Costs, LinkCosts
from policies.crossover import Mode, Snapshot, choose
from policies.scenarios import edge
from serve_app import cli, plan
from serve_app.surroundings import Surroundings
from tests.policies.traces import toy_trace
from tests.serve_app.fake_endpoint import URL, error, install
from tests.serve_app.server import TEXT, serving
from tests.serve_app.test_auth import digests

HERE = Snapshot(Costs(36.0, 30.0, 0.5), LinkCosts(50.0, 1.0, 0.01), (0.93,), 4, 8)
DECISION = choose(HERE, "latency")
TOLD = Surroundings.of(HERE, "latency", DECISION)


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "maps", partial(plan.maps, cells=4))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *arguments], env={"COLUMNS": "200"})


def serve(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> list[httpx.Request]:
    """An endpoint that answers so where it is asked for its surroundings."""
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy-target"}]})
        return answer

    install(handler, monkeypatch)
    return asked


# ---- the maps


@pytest.mark.parametrize("rtt_ms", [0.0, 50.0, 2000.0])
@pytest.mark.parametrize("draft_ms", [0.5, 36.0, 900.0])
def test_the_axes_hold_the_point_whatever_it_is(rtt_ms: float, draft_ms: float) -> None:
    here = Snapshot(Costs(draft_ms, 30.0), LinkCosts(rtt_ms), (0.9,), 4, 8)
    drawn = plan.maps(here)
    assert drawn.rtts_ms[0] < max(rtt_ms, plan.MIN_SHOWN_MS) < drawn.rtts_ms[-1]
    assert drawn.drafts_ms[0] < draft_ms < drawn.drafts_ms[-1]
    assert len(drawn.panels) == len(plan.VERIFY_FACTORS)


def test_the_point_gets_the_reason_of_crossover() -> None:
    drawn = plan.maps(HERE)
    assert drawn.here == DECISION
    assert DECISION.reason in plan.describe(drawn)
    assert "draft 36 ms, verify 30 ms + 0.5 ms per id, round trip 50 ms" in plan.describe(drawn)


def test_a_lead_is_the_best_other_mode_over_this_one() -> None:
    cloud, both = DECISION.predictions
    lead = both.tpt_ms / cloud.tpt_ms
    assert plan.lead(DECISION, Mode.CLOUD_ONLY, "latency") == pytest.approx(lead)
    assert plan.lead(DECISION, Mode.COLLABORATIVE, "latency") == pytest.approx(1.0 / lead)
    alone = choose(Snapshot(Costs(), LinkCosts(50.0), (), 4, 8), "latency")
    assert plan.lead(alone, Mode.CLOUD_ONLY, "latency") == math.inf


def test_a_scenario_is_measured_and_brings_its_own_edge_target() -> None:
    found = plan.of_scenario(edge(10.0, 50.0, 40.0), toy_trace(prompts=8, length=48))
    assert found.costs.draft_ms == pytest.approx(10.0)
    assert found.forward_ms(1) == pytest.approx(40.0)
    assert found.edge_target_ms == pytest.approx(23.0)


def test_a_trace_too_short_to_measure_is_told() -> None:
    with pytest.raises(plan.PlanError, match="too short"):
        plan.of_scenario(edge(10.0, 50.0), toy_trace(prompts=1, length=2))


# ---- the picture


@pytest.mark.parametrize("edge_target_ms", [None, 83.0])
def test_the_picture_has_a_panel_for_each_verify_time_and_the_point_in_one(
    tmp_path: Path, edge_target_ms: float | None
) -> None:
    here = Snapshot(HERE.costs, HERE.link, HERE.prefix, 4, 8, edge_target_ms=edge_target_ms)
    out = tmp_path / "plan.svg"
    plan.draw(plan.maps(here), out)
    content = out.read_text()
    assert [content.count(f"<!-- verify {ms} ms -->") for ms in ("15.2", "30.5", "61")] == [1, 1, 1]
    assert ("edge-only" in content) == (edge_target_ms is not None)


def test_an_unknown_ending_is_told_with_those_known(tmp_path: Path) -> None:
    with pytest.raises(plan.PlanError, match="png"):
        plan.draw(plan.maps(HERE), tmp_path / "plan.exe")


def test_without_matplotlib_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    serve(monkeypatch, httpx.Response(200, json=TOLD.model_dump()))
    done = run("--url", URL, "--out", str(tmp_path / "plan.png"))
    assert done.exit_code == 1
    assert "outrider[plan]" in done.output


# ---- from a running system


def test_a_running_system_is_asked_once_and_its_reason_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[plan.Maps] = []
    monkeypatch.setattr(plan, "draw", lambda maps, out: drawn.append(maps))
    asked = serve(monkeypatch, httpx.Response(200, json=TOLD.model_dump()))
    done = run("--url", URL)
    assert done.exit_code == 0, done.output
    assert [request.url.path for request in asked] == ["/v1/models", "/environment"]
    assert DECISION.reason in done.output
    assert drawn[0].snapshot == Snapshot(
        HERE.costs, HERE.link, HERE.prefix, HERE.draft_len, HERE.max_navs_in_flight, HERE.nav_bytes
    )


def test_the_objective_of_the_running_system_is_that_of_the_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[plan.Maps] = []
    monkeypatch.setattr(plan, "draw", lambda maps, out: drawn.append(maps))
    told = Surroundings.of(HERE, 2.5, None)
    serve(monkeypatch, httpx.Response(200, json=told.model_dump()))
    assert run("--url", URL).exit_code == 0
    assert drawn[0].objective == 2.5


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (error(503, "too little is measured yet"), "too little is measured"),
        (error(404, "Not Found"), "Not Found"),
        (httpx.Response(200, json={"draft_ms": 1.0}), "verify_ms"),
        (httpx.Response(200, json=TOLD.model_dump() | {"rtt_ms": -1.0}), "rtt_ms"),
        (httpx.Response(200, json=TOLD.model_dump() | {"draft_ms": 0.0}), "draft_ms"),
    ],
)
def test_what_cannot_be_planned_from_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, named: str
) -> None:
    serve(monkeypatch, answer)
    monkeypatch.setattr(plan, "draw", lambda maps, out: pytest.fail("nothing to draw"))
    monkeypatch.setattr(sys, "argv", ["outrider", "plan", "--url", URL])
    done = run("--url", URL)
    assert done.exit_code == 1
    assert named in (done.output or str(done.exception)) + str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--scenario", "rtt50", "--url", URL], 2, "not both"),
        (["--scenario", "nowhere"], 1, "rtt300"),
    ],
)
def test_a_wrong_argument_is_told(arguments: list[str], status: int, named: str) -> None:
    done = run(*arguments)
    assert done.exit_code == status
    assert named in done.output


# ---- GET /environment


async def asked(client: httpx.AsyncClient, count: int) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "secret", "max_tokens": 60, "temperature": 0}
    for _ in range(count):
        assert (await client.post(TEXT, json=body)).status_code == 200
    return await client.get("/environment")


@pytest.mark.parametrize("method", ["vanilla", "auto"])
async def test_what_sessions_measured_is_told_once_it_is_enough(method: str) -> None:
    async with serving(**{"policy.method": method}) as server:
        early = await server.client.get("/environment")
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "not_measured"
        told = Surroundings.model_validate((await asked(server.client, 12)).json())
        learned = server.api.learned
        assert learned is not None
        assert told.acceptance_rate == learned.counts.acceptance_rate
        assert told.draft_len == learned.window.num_tokens
        assert told.objective == learned.method.objective
        assert told.snapshot().link.rtt_ms == told.rtt_ms >= 0.0
        decision = learned.modes.decision if learned.modes else None
        assert (told.mode, told.reason) == (
            (None, None) if decision is None else (decision.mode, decision.reason)
        )


async def test_a_method_that_never_drafts_measures_nothing() -> None:
    async with serving(**{"policy.method": "cloud-only"}) as server:
        assert (await asked(server.client, 2)).status_code == 503


async def test_before_the_models_are_loaded_it_says_so(client: httpx.AsyncClient) -> None:
    response = await client.get("/environment")
    assert response.status_code == 503
    assert "still loading" in response.json()["error"]["message"]


async def test_it_needs_the_key() -> None:
    async with serving(key_digests=digests("right")) as server:
        assert (await server.client.get("/environment")).status_code == 401
        headers = {"authorization": "Bearer right"}
        response = await server.client.get("/environment", headers=headers)
        assert response.json()["error"]["code"] == "not_measured"


def test_what_is_told_is_read_back_as_it_was() -> None:
    again = Surroundings.model_validate(json.loads(TOLD.model_dump_json()))
    assert again == TOLD
    assert again.mode is Mode.CLOUD_ONLY
    assert again.snapshot() == HERE
