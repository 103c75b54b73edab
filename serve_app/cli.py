"""The command line, `outrider`. Starts without Ray, llama_cpp and FastAPI.

What talks to an endpoint is imported by its command: the OpenAI client takes most of a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from serve_app import weights
from serve_app.bench import prompts
from serve_app.traces import SHIPPED

app = typer.Typer(
    name="outrider",
    help="Edge-cloud speculative decoding on Ray Serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
weights_app = typer.Typer(
    help="The models' files: fetch, list, verify.", no_args_is_help=True, add_completion=False
)
app.add_typer(weights_app, name="weights")
trace_app = typer.Typer(
    help="Traces of a pair of models, for `outrider simulate`.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(trace_app, name="trace")

Names = Annotated[list[str] | None, typer.Argument(metavar="NAMES", show_default=False)]
Url = Annotated[str, typer.Option(help="The endpoint; its key is taken from $OUTRIDER_API_KEY.")]
LOCAL_URL = "http://127.0.0.1:8000"


class Method(StrEnum):
    SPECULATIVE = "speculative"
    OFF = "off"


class DatasetName(StrEnum):
    HUMANEVAL = prompts.HUMANEVAL.name
    GSM8K = prompts.GSM8K.name
    SPECBENCH = prompts.SPECBENCH.name


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command()
def chat(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MESSAGE", show_default=False)
    ] = None,
    url: Url = LOCAL_URL,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer, at most.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeats a sampled answer.", show_default=False)
    ] = None,
    method: Annotated[
        Method, typer.Option(help="off: the target decodes alone.")
    ] = Method.SPECULATIVE,
) -> None:
    """Answer MESSAGE, or all of a piped stdin; on a terminal, hold a conversation.

    Tokens are marked by their origin: accepted, recovered or bonus.
    /reset starts anew, /exit or Ctrl-D ends; Ctrl-C stops an answer and keeps
    what came.
    """
    message = " ".join(words) if words else None
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.buffer.read().decode(errors="replace")
    if message is not None and not message.strip():
        typer.echo("outrider: the message is empty", err=True)
        raise typer.Exit(1)

    from serve_app.chat import run
    from serve_app.client import Settings, connect

    run(connect(url), message, system, Settings(method, max_tokens, temperature, seed))


@app.command()
def bench(
    url: Url = LOCAL_URL,
    dataset: Annotated[
        DatasetName,
        typer.Option(help="Raw HumanEval prompts (odd indices), or GSM8K or Spec-Bench by chat."),
    ] = DatasetName.HUMANEVAL,
    limit: Annotated[
        int, typer.Option(min=1, help="Prompts, evenly spaced over the set; always the same ones.")
    ] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 64,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder to look into first for the data set.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="On stdout one JSON line only, the table on stderr.")
    ] = False,
) -> None:
    """Measure speculation against the target alone: greedy, every prompt both ways.

    Times are taken at this client. TTFT is the time to the first chunk with a
    token, TPT the total time / tokens, TPOT the time after the first token /
    tokens after it, ITL the gap between chunks with tokens, of which one may
    bring several. Every token is compared with the target's own.
    The last line is one JSON object. The exit status is 1 if a prompt failed, or
    a token is neither the target's nor a near tie.
    """
    chosen = prompts.DATASETS[dataset]
    texts = [text for _, text in prompts.spaced_prompts(chosen, limit, data)]

    from serve_app.bench.endpoint import run
    from serve_app.client import connect

    if not run(connect(url), chosen, texts, max_tokens, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def config() -> None:
    """Print the reference of every configuration key, as docs/configuration.md has it."""
    from serve_app.reference import configuration

    typer.echo(configuration(), nl=False)


@trace_app.command("record")
def record_trace(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it, .npz.")],
    draft: Annotated[
        str, typer.Option(help="Draft model: a name of `outrider weights list`, or a .gguf file.")
    ] = weights.DEFAULT_PAIR[0],
    target: Annotated[str, typer.Option(help="Target model.")] = weights.DEFAULT_PAIR[1],
    limit: Annotated[
        int, typer.Option(min=1, help="Prompts of each split of each data set, evenly spaced.")
    ] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 128,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: one per core.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder to look into first for the data sets.", show_default=False),
    ] = None,
) -> None:
    """Record a pair over HumanEval and GSM8K, both splits: half is for tuning.

    Greedy. Stored are token ids, confidences and entropies, no text; what is
    recorded is the target's own answer, and what the draft model would have said
    at each of its positions. 80 prompts of 128 tokens take the default pair
    about half an hour on two cores.
    """
    from serve_app.bench.record import run

    run(
        out,
        draft=draft,
        target=target,
        limit=limit,
        max_tokens=max_tokens,
        threads=threads or os.cpu_count() or 1,
        data=data,
    )


@app.command()
def simulate(
    scenario: Annotated[
        str,
        typer.Option(metavar="FILE|NAME", help="A YAML file or a name; an unknown one lists all."),
    ] = "rtt50",
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="By `outrider trace record`; default: shipped.")
    ] = SHIPPED,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="Only this one; may be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="On stdout one JSON line only, the table on stderr.")
    ] = False,
) -> None:
    """Replay a trace in a scenario by every method, each tuned.

    The sessions, both halves of the protocol and the controllers are those of
    the product; models, link and clock are simulated. Settings are chosen on the
    trace's tuning split over a fixed grid, figures are of its evaluation split.
    The last line is one JSON object.
    """
    from policies.methods import METHODS
    from policies.traces import TraceError, read
    from serve_app.bench.simulate import run
    from serve_app.scenario_file import ScenarioError, load

    unknown = [name for name in methods or () if name not in METHODS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(METHODS)}")
    try:
        played, recorded = load(scenario), read(trace)
    except (ScenarioError, TraceError) as error:
        raise typer.BadParameter(str(error)) from error
    run(scenario, played, recorded, methods or list(METHODS), as_json)


@app.command()
def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An unknown one lists all.")],
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="By `outrider trace record`; default: shipped.")
    ] = SHIPPED,
) -> None:
    """Redo one table or figure of docs/evidence.md; the last line is one JSON object."""
    from policies.traces import TraceError, read
    from serve_app.bench.studies import STUDIES
    from serve_app.bench.studies import study as find

    if name not in STUDIES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(STUDIES)}")
    try:
        recorded = read(trace)
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error
    report = find(name)(recorded)
    typer.echo(report.markdown())
    typer.echo(report.json_line())


@app.command()
def plan(
    scenario: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Plan from a simulated scenario, not a running system.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help=f"The running system, default {LOCAL_URL}; its key is taken from "
            "$OUTRIDER_API_KEY.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The picture.")] = Path("plan.png"),
) -> None:
    """Map which mode is best: edge-only, cloud-only or collaborative, and why.

    Over round trip and draft time, a panel for each verify time: half of what it
    is, that, and twice it. Times, acceptance and draft length are those that the
    running system has measured, or that our method measures in the scenario.
    Where nothing was drafted yet, there is nothing to plan from.
    """
    from serve_app import plan as planning
    from serve_app.scenario_file import load

    if scenario is not None and url is not None:
        raise typer.BadParameter("give --scenario or --url, not both")
    try:
        if scenario is not None:
            from policies.traces import read

            drawn = planning.maps(planning.of_scenario(load(scenario), read(SHIPPED)))
        else:
            from serve_app.client import connect

            told = connect(url or LOCAL_URL).surroundings()
            drawn = planning.maps(told.snapshot(), told.objective or "latency")
        planning.draw(drawn, out)
    except ValueError as error:
        typer.echo(f"outrider: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{planning.describe(drawn)}\n{out}")


@weights_app.command("pull")
def pull_weights(names: Names = None) -> None:
    """Fetch files by hash, whatever the source. Without names: the default pair."""
    models = [weights.find(name) for name in names or weights.DEFAULT_PAIR]
    for model in models:
        path = weights.pull(model, weights.cache_dir(), watch=_with_progress_bar)
        typer.echo(f"{model.name}: {path}")


@weights_app.command("list")
def list_weights(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array on stdout.")] = False,
) -> None:
    """Every known model and where its file lies or belongs."""
    cache = weights.cache_dir()
    rows = [
        {
            "name": model.name,
            "sha256": model.sha256,
            "bytes": model.num_bytes,
            "path": str(cache / model.file),
            "present": weights.present(model, cache),
        }
        for model in weights.CATALOGUE.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = "present" if row["present"] else "absent"
        typer.echo(f"{row['name']:<28} {state:<7} {row['bytes']:>13,} bytes  {row['path']}")


@weights_app.command("verify")
def verify_weights(names: Names = None) -> None:
    """Hash files in full. Without names: the default pair and whatever else is present."""
    cache = weights.cache_dir()
    chosen = [weights.find(name) for name in names or weights.DEFAULT_PAIR]
    if not names:
        others = (m for m in weights.CATALOGUE.values() if m not in chosen)
        chosen += [model for model in others if (cache / model.file).exists()]
    bad = []
    for model in chosen:
        try:
            weights.check(model, cache)
            typer.echo(f"{model.name}: ok")
        except weights.WeightsError as error:
            bad.append(str(error))
    if bad:
        raise weights.WeightsError("\n".join(bad))


def _with_progress_bar(model: weights.Model, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if not sys.stderr.isatty():
        yield from chunks
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    rates = (TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, *rates, console=Console(stderr=True), transient=True)
    task = bar.add_task(model.name, total=model.num_bytes)
    try:
        for chunk in chunks:
            bar.start()  # from the first bytes on: the hub's own bar comes before them
            yield chunk
            bar.advance(task, len(chunk))
    finally:
        bar.stop()


def main() -> None:
    """Entry point: an expected error is one message on stderr and exit status 1."""
    try:
        app()
    except (weights.WeightsError, OSError) as error:
        typer.echo(f"outrider: {error}", err=True)
        sys.exit(1)
