"""The deployment graph on a labelled Ray cluster, with the scripted pair."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.types import SamplingParams
from tests.e2e import scripted
from tests.e2e.conftest import Deploy
from tests.e2e.scripted import SCRIPTED

PROMPT = "once upon a time"


def alone(count: int, prompt: str = PROMPT, sampling: SamplingParams | None = None) -> str:
    return scripted.alone(prompt, count, sampling)


def body(count: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": count, "temperature": 0} | more


def replicas(deployment: str) -> dict[str, str]:
    """Actor name → node id of the live replicas of a deployment."""
    import ray

    return {
        actor["Name"]: actor["Address"]["NodeID"]
        for actor in ray._private.state.actors().values()
        if f"#{deployment}#" in actor["Name"] and actor["State"] == "ALIVE"
    }


def test_the_graph_answers_as_the_target_alone_would(deploy: Deploy) -> None:
    client = deploy(**SCRIPTED)
    for more in ({}, {"outrider": {"method": "off"}}, {"temperature": 0.9, "seed": 3}):
        answer = client.post("/v1/completions", json=body(50, **more)).json()
        sampling = SamplingParams(0.9, seed=3) if "seed" in more else None
        assert answer["choices"][0]["text"] == alone(50, sampling=sampling)
        assert answer["outrider"]["ttft_ms"] < 4_000  # no resend, which comes after 5 s


@pytest.mark.parametrize("method", ["pipesd", "ucb-contextual", "outrider"])
def test_every_kind_of_method_answers_as_the_target_alone_would(
    deploy: Deploy, method: str
) -> None:
    """Tuner in its thread, bandit, window: what is learned never changes the text."""
    times = {"scripted.draft_ms": 1, "scripted.verify_ms": 4}
    client = deploy(**SCRIPTED, **times, **{"policy.method": method})

    def ask(number: int) -> dict[str, Any]:
        answer: dict[str, Any] = client.post("/v1/completions", json=body(200 + number)).json()
        return answer

    with ThreadPoolExecutor(4) as pool:
        for number, answer in enumerate(pool.map(ask, range(12))):
            assert answer["choices"][0]["text"] == alone(200 + number)
            assert answer["outrider"]["mode"] == "speculative"


def test_no_call_of_a_window_in_flight_is_lost_on_the_way(deploy: Deploy) -> None:
    """Un-awaited calls of one request, several at once: none waits for the resend after 5 s."""
    window = {
        "policy.draft_len": 1,
        "policy.draft_while_waiting": True,
        "policy.max_navs_in_flight": 8,
    }
    client = deploy(**SCRIPTED, **window, **{"scripted.agreement": 1.0})
    for _ in range(5):
        answer = client.post("/v1/completions", json=body(60)).json()
        assert answer["choices"][0]["text"] == alone(60)
        assert answer["outrider"]["tpt_ms"] * 60 < 4_000


def test_deployments_run_on_the_nodes_of_their_tier(deploy: Deploy) -> None:
    import ray

    deploy(**SCRIPTED)
    tier = {node["NodeID"]: node["Labels"].get("outrider.io/tier") for node in ray.nodes()}
    placed = {
        name: {tier[node] for node in replicas(name).values()}
        for name in ("Driver", "EdgeDrafter", "CloudVerifier")
    }
    assert placed == {"Driver": {"edge"}, "EdgeDrafter": {"edge"}, "CloudVerifier": {"cloud"}}


def test_concurrent_requests_over_two_verifier_replicas_do_not_mix(deploy: Deploy) -> None:
    client = deploy(**SCRIPTED, **{"verifier.num_replicas": 2})

    def ask(i: int) -> bool:
        prompt = f"request {i}"
        answer = client.post("/v1/completions", json=body(30) | {"prompt": prompt}).json()
        return bool(answer["choices"][0]["text"] == alone(30, prompt))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(32)))


@pytest.mark.parametrize("method", ["speculative", "off"])
def test_killed_verifier_replicas_do_not_change_the_stream(deploy: Deploy, method: str) -> None:
    """Every replica is killed mid-stream; the session is opened again on a new one."""
    import ray

    client = deploy(**SCRIPTED, **{"scripted.verify_ms": 30, "verifier.num_replicas": 2})
    request = body(60, stream=True, outrider={"method": method})
    text, killed, done = "", False, False
    with client.stream("POST", "/v1/completions", json=request) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if not killed and len(text) >= 10:
                for name in replicas("CloudVerifier"):
                    ray.kill(ray.get_actor(name, namespace="serve"))
                killed = True
    assert killed
    assert done
    assert text == alone(60)


def test_a_client_that_leaves_frees_drafter_and_verifier(deploy: Deploy) -> None:
    """One place on each side: a request after 5 abandoned ones is drafted and answered."""
    one_place = {"verifier.max_sessions": 1, "draft.max_sessions": 1, "scripted.verify_ms": 5}
    client = deploy(**SCRIPTED, **one_place)
    for _ in range(5):
        with client.stream("POST", "/v1/completions", json=body(4_000, stream=True)) as response:
            next(response.iter_lines())
    answer = client.post("/v1/completions", json=body(20)).json()
    assert answer["choices"][0]["text"] == alone(20)
    assert answer["outrider"]["mode"] == "speculative"


def test_an_abandoned_whole_answer_frees_its_place_too(deploy: Deploy) -> None:
    one_place = {"verifier.max_sessions": 1, "draft.max_sessions": 1, "scripted.verify_ms": 5}
    client = deploy(**SCRIPTED, **one_place)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body(4_000), timeout=0.5)
    answer = client.post("/v1/completions", json=body(20)).json()
    assert answer["choices"][0]["text"] == alone(20)


def test_a_driver_that_dies_frees_drafter_and_verifier(deploy: Deploy) -> None:
    """Its streams break with it; the next driver's first request finds the one place free."""
    import ray

    one_place = {"verifier.max_sessions": 1, "draft.max_sessions": 1, "scripted.verify_ms": 5}
    client = deploy(**SCRIPTED, **one_place)
    with client.stream("POST", "/v1/completions", json=body(4_000, stream=True)) as response:
        next(response.iter_lines())
        for name in replicas("Driver"):
            ray.kill(ray.get_actor(name, namespace="serve"))
    deadline = time.monotonic() + 60
    while True:  # until Serve has a new driver
        answer = client.post("/v1/completions", json=body(20))
        if answer.status_code == 200 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert answer.json()["choices"][0]["text"] == alone(20)
    assert answer.json()["outrider"]["mode"] == "speculative"


def test_more_requests_than_places_wait_and_are_all_answered(deploy: Deploy) -> None:
    two_places = {"verifier.max_sessions": 2, "draft.max_sessions": 2, "http.max_sessions": 80}
    client = deploy(**SCRIPTED, **two_places)

    def ask(i: int) -> bool:
        prompt = f"request {i}"
        with httpx.Client(base_url=client.base_url, timeout=120) as own:
            answer = own.post("/v1/completions", json=body(10) | {"prompt": prompt}).json()
        return bool(answer["choices"][0]["text"] == alone(10, prompt))

    with ThreadPoolExecutor(80) as pool:
        assert all(pool.map(ask, range(80)))


def test_what_is_too_much_is_refused_at_once_and_the_rest_is_answered(deploy: Deploy) -> None:
    """C50: 503 before any event, what was admitted is right, and then all is well."""
    narrow = {"verifier.max_sessions": 2, "http.max_sessions": 5, "http.max_choices": 5}
    client = deploy(**SCRIPTED, **narrow, **{"scripted.verify_ms": 50})

    def ask(i: int) -> int:
        request = body(20, stream=i % 2 == 0)
        with httpx.Client(base_url=client.base_url, timeout=120) as own:
            response = own.post("/v1/completions", json=request)
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "overloaded"
            assert "Retry-After" in response.headers
        elif i % 2 == 0:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["choices"][0]["text"] == alone(20)
        return response.status_code

    with ThreadPoolExecutor(15) as pool:
        statuses = list(pool.map(ask, range(15)))
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 5
    assert ask(1) == 200


def test_wrong_arguments_of_serve_run_are_named_before_anything_starts() -> None:
    root = Path(__file__).parents[2]
    for argument, named in (("gama=3", "gama"), ("draft.context=many", "draft.context")):
        ran = subprocess.run(
            [Path(sys.executable).with_name("serve"), "run", "serve_app:graph", argument],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode != 0
        assert named in ran.stderr
