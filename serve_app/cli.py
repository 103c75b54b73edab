"""The command line, `outrider`. Starts without Ray, llama_cpp and FastAPI."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
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

Names = Annotated[list[str] | None, typer.Argument(metavar="NAMES", show_default=False)]


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
