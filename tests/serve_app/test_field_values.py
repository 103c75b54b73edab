"""Values of fields that cannot be served: refused naming the field, and nobody else notices.

After every one a canary request must be answered as ever.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve_app.server import CHAT, TEXT, assert_refused, post_raw

TURN = {"role": "user", "content": "hello"}

VALUES: list[tuple[str, list[str]]] = [
    ("temperature", ["-1", "2.1", "1e9", '"0.5"', "true", "1e400", "1" + "0" * 400, "[]", "{}"]),
    ("top_p", ["0", "-0.1", "1.1", "false", '"1"']),
    ("top_k", ["-2", "1.0", "true", '"3"']),
    ("repetition_penalty", ["0", "-1", "2.5", "true"]),
    ("presence_penalty", ["2.1", "-2.1", "1e400"]),
    ("frequency_penalty", ["2.1", "-1e308", '"0"']),
    ("max_tokens", ["-5", "0", "1.5", "1e12", '"12"', "true", "-" + "9" * 4000]),
    ("min_tokens", ["-1", "1.0", "99", "9" * 4000]),
    ("seed", ["1" + "0" * 20, '"a"', "1.0", "9223372036854775808", "9" * 4000]),
    ("n", ["0", "-1", "17", "1.0", "9" * 4000]),
    ("logprobs", ["-1", "6", "true", "1.0"]),
    ("stream", ["1", '"true"', "{}"]),
    ("stop", ['""', '["a","b","c","d","e"]', '[""]', "[1]", "[null]", '"' + "x" * 3_000 + '"']),
    ("store", ["1"]),
    ("user", ["3", "[]"]),
    ("metadata", ["3", '"x"', "[]"]),
    ("metadata.x", ['{"x":1}', '{"x":{"x":1}}', '{"x":"' + "v" * 513 + '"}']),
    ("logit_bias", ["[]", "3", json.dumps({str(i): 0 for i in range(400)})]),
    ("logit_bias.97", ['{"97":101}', '{"97":null}', '{"97":true}', '{"97":1e400}']),
    ("logit_bias.-1", ['{"-1":1}']),
    ("logit_bias.12x", ['{"12x":1}']),
    ("logit_bias.257", ['{"257":1}']),
    ("logit_bias.1099511627776", ['{"1099511627776":1}']),
    ("logit_bias.097", ['{"97":60,"097":60}']),
    ("stream_options", ["3", '"x"', "[]", '{"include_usage":true}']),
    ("stream_options.x", ['{"x":1}']),
    ("outrider", ["3", '"off"', "[]"]),
    ("outrider.method", ['{"method":"fast"}', '{"method":3}', '{"method":"\\ud800"}']),
    ("prompt", ["3", "true", "{}", "[]", "[[]]", "[1.5]", "[true]", '[97,"a"]', "[null]", '""']),
    ("prompt", ["[-1]", "[999999]", "[257]", "[" + "9" * 4000 + "]", '["a",97]', '[""]', "null"]),
    ("prompt.0", ['["","hello"]', "[[999],[97]]"]),
    ("prompt.1", ['["hello",""]', "[[97],[-1]]"]),
]


@pytest.mark.parametrize(("param", "values"), VALUES)
async def test_a_value_out_of_range_or_of_a_wrong_type_is_refused_by_name(
    ready: httpx.AsyncClient, param: str, values: list[str]
) -> None:
    """C43, C25, C15."""
    field = param.partition(".")[0]
    for value in values:
        rest = "" if field == "prompt" else '"prompt":"a",'
        body = f'{{{rest}"max_tokens":3,"{field}":{value}}}'
        if field == "max_tokens":
            body = f'{{{rest}"{field}":{value}}}'
        await assert_refused(ready, TEXT, body, param, said=field)


@pytest.mark.parametrize(
    "fields",
    [
        *({"repetition_penalty": tiny} for tiny in (1e-3, 1e-30, 1e-38, 1e-46, 5e-324)),
        {"repetition_penalty": 2, "presence_penalty": -2, "frequency_penalty": -2},
        {"temperature": 1e-9},
        {"temperature": 5e-324, "top_p": 5e-324},
        {"temperature": 2, "top_p": 1e-300, "top_k": 10**4000},
        {"max_tokens": 10**400, "min_tokens": 10**400},
        {"seed": -(2**63)},
        {"logit_bias": {str(i): -100 for i in range(257)}},
        {"logit_bias": {str(i): 100 for i in range(257)}, "repetition_penalty": 0.01},
    ],
)
async def test_an_extreme_value_is_served_or_refused_but_breaks_nothing(
    ready: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    """C43: what passes validation must not crash what comes after."""
    body = {"prompt": "a", "max_tokens": 20, "logprobs": 5, "temperature": 1} | fields
    response = await post_raw(ready, TEXT, body)
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed", "stop", "n", "logprobs"])
async def test_null_is_the_default(ready: httpx.AsyncClient, field: str) -> None:
    """C43."""
    body = {"prompt": "a", "temperature": 0}
    answers = [(await post_raw(ready, TEXT, b)).json() for b in (body, body | {field: None})]
    assert field == "temperature" or len({a["choices"][0]["text"] for a in answers}) == 1
    assert [a["usage"]["completion_tokens"] for a in answers] == [16, 16]


@pytest.mark.parametrize(
    "name", ["str", "x[0]", "list[str]", "", " ", "\0", "é", "k" * 3000, "None"]
)
async def test_an_unknown_field_is_named_whatever_its_name(
    ready: httpx.AsyncClient, name: str
) -> None:
    for path, body, param in [
        (TEXT, {"prompt": "a", name: 1}, name),
        (TEXT, {"prompt": "a", "outrider": {name: 1}}, f"outrider.{name}"),
        (CHAT, {"messages": [TURN, TURN | {name: 1}]}, f"messages.1.{name}"),
    ]:
        error = (await post_raw(ready, path, body)).json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"].removesuffix("…") == param[:500]
        assert param[:400] in error["message"]
