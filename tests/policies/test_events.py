"""Messages and work, as errors and logs show them."""

from __future__ import annotations

import pytest

from policies.events import Check, Prefill
from policies.types import Batch, Open, SamplingParams, TokenLogprobs, Verdict, VerdictKind

SECRET = 986_543
SAMPLING = SamplingParams(logit_bias=((SECRET, 1.0),), stop_ids=frozenset({SECRET}))


@pytest.mark.parametrize(
    "shown",
    [
        Open("s", 0, (SECRET,), (SECRET,), SAMPLING),
        Batch("s", 0, 1, (SECRET,), nav=True),
        Verdict(
            "s",
            0,
            1,
            VerdictKind.BONUS,
            next_id=SECRET,
            logprobs=(TokenLogprobs(-1.0, ((SECRET, -1.0),)),),
        ),
        Prefill((SECRET,), SAMPLING),
        Check(1, (SECRET,)),
    ],
)
def test_what_an_error_may_show_of_a_message_tells_no_id(shown: object) -> None:
    assert str(SECRET) not in f"{shown} {shown!r}"
