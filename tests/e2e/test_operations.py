"""What an operator relies on: readiness that explains itself, metrics, shutdown, many clients."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from policies.types import SamplingParams
from serve_app.telemetry import METRICS
from tests.e2e.conftest import Deploy
from tests.e2e.scripted import SCRIPTED, alone


def test_ready_says_which_deployment_fails_and_why(cluster_url: str, tmp_path: Path) -> None:
    """C49: a model that cannot load shows within a minute, and requests are told 503 meanwhile."""
    from ray import serve

    from serve_app import graph
    from serve_app.config import GraphArgs

    args = GraphArgs.model_validate(SCRIPTED | {"verifier.engine": "llama"})
    broken = args.verifier.model_copy(update={"model": str(tmp_path / "absent.gguf")})
    args = args.model_copy(update={"verifier": broken})
    serve._run(graph(args), name="outrider", route_prefix="/", _blocking=False)
    try:
        deadline = time.monotonic() + 120
        with httpx.Client(base_url=cluster_url, timeout=30) as client:
            while time.monotonic() < deadline:
                ready = client.get("/ready")
                if "absent.gguf" in ready.text:
                    break
                time.sleep(0.5)
            assert ready.status_code == 503
            assert "target" in ready.json()["missing"]
            assert "absent.gguf" in ready.json()["deployments"]["CloudVerifier"]
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert "Retry-After" in refused.headers
    finally:
        serve.delete("outrider")


def test_documented_metrics_are_exported_and_gauges_return_to_zero(deploy: Deploy) -> None:
    import ray

    client = deploy(**SCRIPTED)
    body = {"prompt": "once", "max_tokens": 30, "temperature": 0}
    assert client.post("/v1/completions", json=body).status_code == 200
    only_in_trouble = {"cancelled", "failed", "degraded", "resends", "reopens"}
    wanted = {m.name for m in METRICS if m.name.removeprefix("outrider_") not in only_in_trouble}
    ports = [node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]]
    host = ray.nodes()[0]["NodeManagerAddress"]
    deadline = time.monotonic() + 60  # Ray exports every few seconds
    while True:
        lines = "".join(httpx.get(f"http://{host}:{port}/metrics").text for port in ports)
        missing = {name for name in wanted if f"ray_{name}" not in lines}
        open_gauges = [
            line
            for line in lines.splitlines()
            if line.startswith("ray_outrider") and "_sessions{" in line and line[-4:] != " 0.0"
        ]
        if not missing and not open_gauges:
            break
        assert time.monotonic() < deadline, (missing, open_gauges)
        time.sleep(0.5)


@pytest.mark.parametrize(("grace_s", "finishes"), [(20.0, True), (1.0, False)])
def test_a_removed_application_finishes_its_streams_or_cuts_them_short_of_done(
    deploy: Deploy, grace_s: float, finishes: bool
) -> None:
    from ray import serve

    client = deploy(**SCRIPTED, **{"scripted.verify_ms": 50, "http.grace_s": grace_s})
    body = {"prompt": "once", "max_tokens": 200, "temperature": 0, "stream": True}
    lines: list[str] = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        stream = response.iter_lines()
        lines.append(next(stream))
        removing = threading.Thread(target=serve.delete, args=("outrider",))
        removing.start()
        if finishes:
            lines += stream
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                lines.extend(stream)
    removing.join()
    assert ("data: [DONE]" in lines) is finishes
    if finishes:
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == alone("once", 200)


def test_mixed_concurrent_clients_never_get_a_foreign_token(deploy: Deploy) -> None:
    """C27: 16 clients; each answer equals the one of the target alone, streamed or not, cut or not.

    The prompts differ, and a toy answer depends on its own last ids only, so a token of another
    session shows at once.
    """
    places = {"verifier.num_replicas": 2, "draft.max_sessions": 16}  # nobody waits for a drafter
    client = deploy(**SCRIPTED, **places, **{"policy.draft_len": 6})

    def ask(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=client.base_url, timeout=120) as own:
            for turn in range(6):
                prompt = f"client {number} turn {turn}"
                seed, count = rng.randrange(1000), rng.randrange(5, 60)
                temperature = rng.choice([0.0, 1.0])
                body = {"prompt": prompt, "max_tokens": count}
                body |= {"temperature": temperature, "seed": seed}
                expected = alone(prompt, count, SamplingParams(temperature, seed=seed))
                if rng.random() < 0.5:
                    answer = own.post("/v1/completions", json=body).json()
                    assert answer["choices"][0]["text"] == expected
                    if answer["outrider"]["drafted"] > 20:
                        assert answer["outrider"]["acceptance_rate"] > 0.2
                    continue
                leave_after = rng.choice([3, 10_000])
                text = ""
                with own.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
                    for number_of_line, line in enumerate(stream.iter_lines()):
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                        if number_of_line >= leave_after:
                            break
                    else:
                        assert text == expected
                assert expected.startswith(text)

    with ThreadPoolExecutor(16) as pool:
        for asked in [pool.submit(ask, number) for number in range(16)]:
            asked.result()
