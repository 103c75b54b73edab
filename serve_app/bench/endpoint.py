"""The endpoint benchmark: a data set with speculation and by the target alone, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.progress import track

from serve_app.bench import figures
from serve_app.bench.measure import Pair, measure
from serve_app.bench.prompts import Dataset
from serve_app.client import Endpoint, EndpointError, printable


def run(
    endpoint: Endpoint, dataset: Dataset, prompts: Sequence[str], max_tokens: int, *, as_json: bool
) -> bool:
    """Print set-up, table and the JSON line; return whether every token passed and none failed.

    With `as_json`, stdout has the JSON line only. Raises EndpointError if every prompt failed.
    """
    typer.echo(
        f"{dataset.name}, {len(prompts)} prompts evenly spaced, at most {max_tokens} tokens each, "
        f"greedy, every prompt both ways in turn\n"
        f"{printable(endpoint.model)} at {printable(endpoint.url)}, times taken at this client",
        err=as_json,
    )
    console = Console(stderr=True)
    outcomes = list(
        track(
            measure(endpoint, dataset.chat, prompts, max_tokens, time.perf_counter),
            description=dataset.name,
            total=len(prompts),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    )
    pairs = [outcome for outcome in outcomes if isinstance(outcome, Pair)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, EndpointError)]
    if not pairs:
        raise EndpointError(f"all {len(errors)} prompts failed; the last one: {errors[-1]}")
    for error in errors:
        typer.echo(f"a prompt failed: {error}", err=True)
    typer.echo(figures.table(pairs), err=as_json)
    setup = {"dataset": dataset.name, "max_tokens": max_tokens, "model": endpoint.model}
    result = setup | figures.summary(pairs) | {"errors": len(errors)}
    typer.echo(json.dumps(result))
    return not errors and not result["mismatches"]
