"""The arguments of the graph: nested by dots, strict about names and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from policies.methods import METHODS
from policies.trigger import FixedTrigger
from serve_app.config import GraphArgs

CONFIGS = sorted((Path(__file__).parents[2] / "serve_app" / "config").glob("*.yaml"))


def test_dotted_and_nested_keys_mean_the_same() -> None:
    dotted = GraphArgs.model_validate({"draft.model": "a.gguf", "verifier.num_replicas": "3"})
    nested = GraphArgs.model_validate(
        {"draft": {"model": "a.gguf"}, "verifier": {"num_replicas": 3}}
    )
    assert dotted == nested
    assert dotted.verifier.num_replicas == 3


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gama": 3}, "gama"),
        ({"draft.modle": "x"}, "draft.modle"),
        ({"verifier.num_replicas": "many"}, "verifier.num_replicas"),
        ({"verifier.num_replicas": 0}, "verifier.num_replicas"),
        ({"policy.trigger": "never"}, "policy.trigger"),
        ({"policy.draft_len": 20, "policy.max_window": 10}, "policy: draft_len"),
        ({"policy.method": "fastest"}, "policy.method"),
        ({"policy.method": "ucb", "policy.objective": "latency"}, "policy: objective"),
        ({"policy.method": "cloud-only", "policy.objective": "cost"}, "policy: objective"),
        ({"policy.objective": -1}, "policy: objective"),
        ({"policy.objective": "speed"}, "policy.objective"),
        ({"policy.method": "ucb", "policy.draft_while_waiting": True}, "policy: learner"),
        ({"draft": 3, "draft.model": "x"}, "draft"),
        ({"draft": {"model": "x"}, "draft.model": "y"}, "draft.model"),
    ],
)
def test_a_wrong_key_or_value_is_named(values: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=named.replace(".", r"\.")):
        GraphArgs.model_validate(values)


def test_the_policy_is_a_named_method_with_what_is_set_otherwise() -> None:
    args = GraphArgs.model_validate({"policy.method": "outrider", "policy.nav_price_ms": 0})
    assert args.policy.chosen() == replace(METHODS["outrider"], nav_price_ms=0)
    assert GraphArgs().policy.chosen() == METHODS["vanilla"]
    by_cost = GraphArgs.model_validate({"policy.method": "auto", "policy.objective": "cost"})
    assert by_cost.policy.chosen() == replace(METHODS["auto"], objective="cost")
    priced = GraphArgs.model_validate({"policy.method": "outrider", "policy.objective": "0.5"})
    assert priced.policy.chosen().objective == 0.5
    assert GraphArgs().policy.session_config().trigger == FixedTrigger(4)
    late = GraphArgs.model_validate({"policy.resend_after_ms": 7})
    assert late.policy.session_config().resend_after_ms == 7


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_yaml_configs_are_valid_for_serve_and_for_the_graph(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert config.http_options.host == "127.0.0.1"
    for application in config.applications:
        assert application.import_path == "serve_app:graph"
        GraphArgs.model_validate(application.args)


def test_there_are_shipped_configs() -> None:
    assert CONFIGS
