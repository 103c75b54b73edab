"""The one import rule, policies ← deployments ← serve_app, never backwards; and short functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "policies": {"deployments", "serve_app"},
    "deployments": {"serve_app"},
}
HEAVY = ("ray", "torch", "llama_cpp", "fastapi", "transformers", "pydantic")


def modules(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def imported(file: Path) -> set[str]:
    """The top-level packages that a file imports anywhere, also inside functions."""
    packages = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.split(".")[0])
    return packages


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_imports_one_above_it(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        assert not imported(file) & FORBIDDEN[package], file


def run_without(blocked: tuple[str, ...], names: list[str]) -> None:
    """Import the modules in a fresh interpreter in which the blocked packages do not exist."""
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_policies_import_neither_ray_nor_any_model_library() -> None:
    run_without(HEAVY, modules("policies"))


def test_driver_drafter_verifier_and_links_import_without_ray() -> None:
    names = ["driver", "drafter", "verifier", "link", "placement", "engines.scripted"]
    run_without(("ray", "torch", "fastapi"), [f"deployments.{name}" for name in names])


def test_the_command_line_imports_without_ray_or_a_model_library() -> None:
    run_without(("ray", "torch", "fastapi", "llama_cpp"), ["serve_app", "serve_app.cli"])


def test_bind_is_called_in_the_app_module_only() -> None:
    files = [
        file
        for package in ("policies", "deployments", "serve_app")
        for file in (ROOT / package).rglob("*.py")
    ]
    binding = {file.relative_to(ROOT).as_posix() for file in files if ".bind(" in file.read_text()}
    assert binding == {"serve_app/app.py"}


@pytest.mark.parametrize("package", ["policies", "deployments", "serve_app"])
def test_no_function_is_longer_than_40_lines(package: str) -> None:
    """Its docstring not counted."""
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
                head = node.body[0].lineno - node.lineno
                assert head + (node.end_lineno or 0) - first.lineno < 40, (file.name, node.name)
