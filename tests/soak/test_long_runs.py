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
from tests.soak.processes import (
    all_over,
    exported,
    private_mib,
    replica_logs,
    serve_processes,
    sessions,
    slopes,
)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]


def assert_no_session_is_left(client: httpx.Client) -> None:
    """All gauges at zero within Ray's export interval, and the next answer is right."""
    deadline = time.monotonic() + 60
    while not all_over(gauges := sessions()):
        assert time.monotonic() < deadline, gauges
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
    """C47: 2,500 streamed and 2,500 whole answers, a fifth abandoned; under 5 MiB per 1,000.

    At rest the object store holds what it held at rest after the first 1,000, so no request leaves
    a reference to anything in it.
    """
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
                with suppress(httpx.TimeoutException):
                    own.post("/v1/completions", json=body | {"max_tokens": 2000}, timeout=0.05)
            else:
                answer = own.post("/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == alone(prompt, count)

    def store_bytes() -> float:
        figures = exported("ray_object_store_memory{")
        assert figures
        return sum(figures.values())

    numbers = itertools.count()
    before = 0.0
    samples: list[tuple[int, dict[str, float]]] = []
    with ThreadPoolExecutor(4) as pool:
        for block in range(25):
            list(pool.map(ask, itertools.islice(numbers, 200)))
            if block == 4:
                assert_no_session_is_left(client)
                before = store_bytes()
            if block >= 4:  # the first 1,000 requests warm allocators and caches
                processes = serve_processes()
                sizes = {name: private_mib(pid) for name, pid in processes.items()}
                samples.append(((block + 1) * 200, sizes))
    growth = slopes(samples)
    for name, slope in growth.items():
        print(f"{slope:+7.2f} MiB per 1,000 requests  {samples[-1][1][name]:7.1f} MiB  {name}")
    assert_no_session_is_left(client)
    after = store_bytes()
    print(f"object store: {before:.0f} bytes before, {after:.0f} after")
    assert after <= before
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
    """C27: mixed temperatures, seeds, stops, streams and cancels, staggered.

    Acceptance by client is within 0.1 of what one client alone sees.
    """
    client = deploy(**SCRIPTED, **{"verifier.num_replicas": 2, "scripted.verify_ms": 2})
    greedy = {"max_tokens": 100, "temperature": 0}
    solo = [
        client.post("/v1/completions", json=greedy | {"prompt": f"solo {i}"}).json()["outrider"]
        for i in range(60)
    ]
    solo_rate = statistics.mean(report["acceptance_rate"] for report in solo)
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
    print(f"{sum(answers)} answers; mean acceptance {solo_rate:.2f} of one client alone, ", end="")
    print(f"{min(means):.2f}–{max(means):.2f} of each of 16")
    assert all(abs(mean - solo_rate) < 0.1 for mean in means)
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
            assert [response.status_code for response in opened] == [200] * 20
            readers = [threading.Thread(target=drain, args=(r,)) for r in opened if reads]
            for reader in readers:
                reader.start()
            for _ in range(3):
                medians.append(median_ms(20))
                sizes.append(memory_mib() - at_rest)
                told = sessions()
                running = [told[name] for name in told if name.startswith("ray_outrider_open")]
                assert sum(running) >= (0 if reads else 1), told
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
    client.timeout = 600
    processes = serve_processes()
    frozen = next(pid for name, pid in processes.items() if "CloudVerifier" in name)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(stream, client, body)
        time.sleep(0.3)
        os.kill(frozen, signal.SIGSTOP)
        started = time.monotonic()
        time.sleep(5.0)
        assert not asking.done()
        try:
            text = asking.result(timeout=400)
        finally:
            if Path(f"/proc/{frozen}").exists():
                os.kill(frozen, signal.SIGCONT)
    print(f"the answer was whole {time.monotonic() - started:.0f} s after its verifier froze")
    assert text == alone("once", 60)
    verifiers = {pid for name, pid in serve_processes().items() if "CloudVerifier" in name}
    assert verifiers - {frozen}


def test_aborts_during_a_prefill_never_lock_the_server(deploy: Deploy, small_path: Path) -> None:
    """C29, C52: streams are left while a prompt of 30,000 characters is prefilled, on a real model.

    100 times, each followed by a short request. All answers are those of a server at rest, no
    replica is replaced while its thread is busy, and the shutdown at the end keeps its time.
    """
    model = {"model": "smollm2-135m-instruct", "context": 8192, "max_sessions": 3}
    client = deploy(draft=model, verifier=model)
    rng = random.Random(2)
    greedy = {"temperature": 0, "max_tokens": 6}
    prompts = {  # whose continuations no rounding can change
        "short": "The capital of France is",
        "long": "The quick brown fox jumps over the lazy dog. " * 666 + "The quick brown fox jumps",
    }

    def ask(prompt: str) -> tuple[str, float]:
        started = time.monotonic()
        with httpx.Client(base_url=client.base_url, timeout=300) as own:
            answer = own.post("/v1/completions", json=greedy | {"prompt": prompts[prompt]}).json()
        return answer["choices"][0]["text"], time.monotonic() - started

    at_rest = {prompt: ask(prompt)[0] for prompt in prompts}
    processes = serve_processes()
    slowest_s = prefills_s = 0.0
    aborts = 0
    with ThreadPoolExecutor(2) as pool:
        while aborts < 100:
            prefilling = pool.submit(ask, "long")
            while not prefilling.done():
                leave(client, rng.uniform(0.0, 0.5))
                aborts += not prefilling.done()
                answering = pool.submit(ask, "short")
                while not answering.done():
                    started = time.monotonic()
                    assert client.get("/health").status_code == 200
                    slowest_s = max(slowest_s, time.monotonic() - started)
                    time.sleep(0.05)
                assert answering.result()[0] == at_rest["short"]
            text, took_s = prefilling.result()
            assert text == at_rest["long"]
            prefills_s = max(prefills_s, took_s)
    print(f"{aborts} aborts; slowest /health {slowest_s * 1000:.0f} ms; ", end="")
    print(f"slowest answer to 30,000 characters {prefills_s:.0f} s")
    assert slowest_s < 1.0
    assert serve_processes() == processes
    shutdown_s = delete_beside_a_stream(client)
    print(f"removed in {shutdown_s:.0f} s beside a stream that would have lasted longer")
    assert shutdown_s < 20 + 20  # http.grace_s, and what Serve needs
    assert "Traceback" not in replica_logs(processes)


def leave(client: httpx.Client, after_s: float) -> None:
    """Begin a stream, and leave it."""
    body = {"prompt": "A", "max_tokens": 800, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        time.sleep(after_s)


def delete_beside_a_stream(client: httpx.Client) -> float:
    from ray import serve

    body = {"prompt": "A", "max_tokens": 8_000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        started = time.monotonic()
        serve.delete("outrider")
        return time.monotonic() - started
