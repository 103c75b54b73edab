"""Long runs over a real cluster: `make soak`. Figures are printed; read them with `-s`."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.types import SamplingParams
from tests.e2e.conftest import Deploy
from tests.e2e.scripted import SCRIPTED, alone
from tests.soak.processes import private_mib, serve_processes, slopes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def gauges() -> dict[str, float]:
    """Every session gauge that Ray exports, by name and replica."""
    import ray

    values = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for line in httpx.get(url).text.splitlines():
            if line.startswith("ray_outrider") and "_sessions{" in line:
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
    return values


def assert_no_session_is_left(client: httpx.Client) -> None:
    """All gauges at zero within Ray's export interval, and the next answer is right."""
    deadline = time.monotonic() + 60
    while any(gauges().values()):
        assert time.monotonic() < deadline, gauges()
        time.sleep(1)
    body = {"prompt": "after", "max_tokens": 20, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == alone("after", 20)
    assert answer["outrider"]["mode"] == "speculative"


def stream(client: httpx.Client, body: dict[str, Any], leave_after: int | None = None) -> str:
    """The text of a streamed completion, up to `leave_after` lines."""
    text = ""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for number, line in enumerate(response.iter_lines()):
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if number == leave_after:
                break
    return text


def test_memory_does_not_grow_with_requests(deploy: Deploy) -> None:
    """C47: 2,000 streamed and 2,000 whole answers, a fifth abandoned; under 5 MiB per 1,000."""
    client = deploy(**SCRIPTED, **{"scripted.verify_ms": 1})
    rng = random.Random(0)

    def ask(number: int) -> None:
        prompt, count = f"request {number}", 24
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
        leave = rng.random() < 0.2
        with httpx.Client(base_url=client.base_url, timeout=120) as own:
            if number % 2:
                text = stream(own, body, leave_after=2 if leave else None)
                assert alone(prompt, count).startswith(text)
                assert leave or text == alone(prompt, count)
            elif leave:
                with suppress(httpx.ReadTimeout):
                    own.post("/v1/completions", json=body | {"max_tokens": 2000}, timeout=0.05)
            else:
                answer = own.post("/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == alone(prompt, count)

    numbers = itertools.count()
    samples: list[tuple[int, dict[str, float]]] = []
    with ThreadPoolExecutor(4) as pool:
        for block in range(25):
            list(pool.map(ask, itertools.islice(numbers, 200)))
            if block >= 4:  # the first 1,000 requests warm allocators and caches
                processes = serve_processes()
                sizes = {name: private_mib(pid) for name, pid in processes.items()}
                samples.append(((block + 1) * 200, sizes))
    growth = slopes(samples)
    for name, slope in growth.items():
        print(f"{slope:+7.2f} MiB per 1,000 requests  {samples[-1][1][name]:7.1f} MiB  {name}")
    assert_no_session_is_left(client)
    assert max(growth.values()) < 5.0


def test_500_cancelled_requests_leave_nothing(deploy: Deploy) -> None:
    client = deploy(**SCRIPTED, **{"scripted.verify_ms": 5, "http.max_sessions": 256})
    rng = random.Random(1)
    delays = [rng.uniform(0.0, 0.3) for _ in range(500)]

    def abandon(delay: float) -> None:
        body = {"prompt": "once", "max_tokens": 2000, "temperature": 0, "stream": delay < 0.2}
        with (
            httpx.Client(base_url=client.base_url, timeout=delay + 0.001) as own,
            suppress(httpx.TimeoutException),
            own.stream("POST", "/v1/completions", json=body) as response,
        ):
            ends = time.monotonic() + delay
            for _ in response.iter_lines():
                if time.monotonic() > ends:
                    break

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(abandon, delays))
    assert_no_session_is_left(client)


def test_16_clients_for_five_minutes_never_get_a_foreign_token(deploy: Deploy) -> None:
    """C27: mixed temperatures, seeds, stops, streams and cancels, staggered."""
    client = deploy(**SCRIPTED, **{"verifier.num_replicas": 2, "scripted.verify_ms": 2})
    ends = time.monotonic() + 300
    answers = [0] * 16
    rates: list[list[float]] = [[] for _ in range(16)]

    def ask(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=client.base_url, timeout=120) as own:
            while time.monotonic() < ends:
                time.sleep(rng.uniform(0.0, 0.2))
                prompt, count = f"codeword {number} {answers[number]}", rng.randrange(5, 120)
                sampling = SamplingParams(rng.choice([0.0, 1.0]), seed=rng.randrange(1000))
                text = alone(prompt, count, sampling)
                body = {"prompt": prompt, "max_tokens": count, "seed": sampling.seed}
                body |= {"temperature": sampling.temperature}
                if rng.random() < 0.3:
                    at = rng.randrange(len(text) - 2)
                    body["stop"] = text[at : at + 2]
                    text = text[: text.find(text[at : at + 2])]
                if rng.random() < 0.5:
                    leave = rng.choice([3, None, None])
                    got = stream(own, body, leave)
                    assert text.startswith(got)
                    assert leave or got == text
                else:
                    answer = own.post("/v1/completions", json=body).json()
                    assert answer["choices"][0]["text"] == text
                    if answer["outrider"]["drafted"] > 20:
                        rates[number].append(answer["outrider"]["acceptance_rate"])
                answers[number] += 1

    with ThreadPoolExecutor(16) as pool:
        for asked in [pool.submit(ask, number) for number in range(16)]:
            asked.result()
    means = [sum(rate) / len(rate) for rate in rates]
    print(f"{sum(answers)} answers; mean acceptance per client {min(means):.2f}–{max(means):.2f}")
    assert max(means) - min(means) < 0.15
    assert_no_session_is_left(client)


def test_readers_that_do_not_read_hold_back_nobody(deploy: Deploy) -> None:
    """C30: 20 clients that never read a 4,000-token stream cost what 20 that read it cost.

    Latency is that of one more client with short requests; both crowds are watched for a minute.
    """
    limits = {"verifier.max_sessions": 32, "draft.max_sessions": 32}
    client = deploy(**SCRIPTED, **limits, **{"scripted.verify_ms": 1})
    body = {"prompt": "once", "max_tokens": 4_000, "temperature": 0, "stream": True}
    normal = {"prompt": "normal", "max_tokens": 20, "temperature": 0}

    def median_ms(seconds: float) -> float:
        taken, ends = [], time.monotonic() + seconds
        while time.monotonic() < ends:
            started = time.monotonic()
            answer = client.post("/v1/completions", json=normal).json()
            taken.append((time.monotonic() - started) * 1000)
            assert answer["choices"][0]["text"] == alone("normal", 20)
        return statistics.median(taken)

    def memory_mib() -> float:
        return sum(private_mib(pid) for pid in serve_processes().values())

    def crowd(reads: bool) -> tuple[float, list[float]]:
        """The other client's median latency, and Serve's memory above rest, every 20 s."""
        at_rest, sizes, medians = memory_mib(), [], []
        with httpx.Client(base_url=client.base_url, timeout=600) as own:
            requests = [own.build_request("POST", "/v1/completions", json=body) for _ in range(20)]
            opened = [own.send(request, stream=True) for request in requests]
            readers = [threading.Thread(target=drain, args=(r,)) for r in opened if reads]
            for reader in readers:
                reader.start()
            for _ in range(3):
                medians.append(median_ms(20))
                sizes.append(memory_mib() - at_rest)
            for response in opened:
                response.close()
            for reader in readers:
                reader.join()
        return statistics.median(medians), sizes

    def drain(response: httpx.Response) -> None:
        with suppress(httpx.StreamError, httpx.TransportError):
            for _ in response.iter_raw():
                pass

    alone_ms = median_ms(10)
    reading_ms, reading_mib = crowd(reads=True)
    idle_ms, idle_mib = crowd(reads=False)
    print(f"other client: {alone_ms:.0f} ms alone, {reading_ms:.0f} beside 20 that read, ", end="")
    print(f"{idle_ms:.0f} beside 20 that do not")
    for name, sizes in (("read", reading_mib), ("do not", idle_mib)):
        print(f"Serve's memory above rest while 20 {name}: {[round(size) for size in sizes]} MiB")
    assert idle_ms < 1.5 * reading_ms
    assert max(idle_mib) < 100
    assert_no_session_is_left(client)


def test_a_frozen_verifier_is_replaced_and_its_answer_goes_on(deploy: Deploy) -> None:
    """C52: the process is stopped by a signal, so nothing in it can tell."""
    client = deploy(**SCRIPTED, **{"scripted.verify_ms": 30})
    body = {"prompt": "once", "max_tokens": 60, "temperature": 0}
    text: list[str] = []
    asking = threading.Thread(target=lambda: text.append(stream(client, body)))
    client.timeout = 600
    processes = serve_processes()
    frozen = next(pid for name, pid in processes.items() if "CloudVerifier" in name)
    asking.start()
    time.sleep(0.3)
    os.kill(frozen, signal.SIGSTOP)
    started = time.monotonic()
    try:
        asking.join(timeout=400)
    finally:
        if Path(f"/proc/{frozen}").exists():
            os.kill(frozen, signal.SIGCONT)
    print(f"the answer was whole {time.monotonic() - started:.0f} s after its verifier froze")
    assert text == [alone("once", 60)]


def test_aborts_during_a_prefill_never_lock_the_server(deploy: Deploy, small_path: Path) -> None:
    """C29: stream A is left while B prefills; then C. 100 times, on a real model."""
    client = deploy(
        **{
            "draft.model": "smollm2-135m-instruct",
            "verifier.model": "smollm2-135m-instruct",
            "draft.context": 1024,
            "verifier.context": 1024,
            "draft.max_sessions": 3,
            "verifier.max_sessions": 3,
        }
    )
    rng = random.Random(2)
    greedy = {"temperature": 0, "max_tokens": 6}
    expected: dict[str, str] = {}
    slowest = 0.0

    def ask(prompt: str) -> None:
        with httpx.Client(base_url=client.base_url, timeout=300) as own:
            answer = own.post("/v1/completions", json=greedy | {"prompt": prompt})
        assert answer.status_code == 200
        text = answer.json()["choices"][0]["text"]
        assert expected.setdefault(prompt, text) == text

    for _ in range(100):
        long = threading.Thread(target=ask, args=("lorem ipsum " * 100,))
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "A", "max_tokens": 800, "stream": True}
        ) as a:
            next(a.iter_lines())
            long.start()
            time.sleep(rng.uniform(0.0, 0.5))
        short = threading.Thread(target=ask, args=("The capital of France is",))
        short.start()
        while long.is_alive() or short.is_alive():
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.05)
    print(f"slowest /health {slowest * 1000:.0f} ms")
    assert slowest < 1.0
