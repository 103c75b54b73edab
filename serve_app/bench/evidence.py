"""Writes docs/evidence.md: every study, one after the other. `make evidence`, half an hour."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from policies.traces import Trace, read
from serve_app.bench.studies import STUDIES, study
from serve_app.traces import SHIPPED

HEAD = """# Evidence

Written by `make evidence`, figures and all. Each section is a command of its own.

Everything is simulated: the product's own sessions and controllers replay a recorded trace of the
default pair ({draft} → {target}, greedy, {prompts} prompts, {tokens} tokens), or the published
acceptance rates of a paper, over simulated links and model times. What is tuned is tuned on the
tuning split; figures are of the evaluation split, which shares no prompt with it. Real times of the
pair on one machine are in the README; they are of another kind, and not compared with these.

TPT is generation time / committed tokens, prefill left out. A NAV is a forward of the verifier.
Where a table disagrees with its paper, the remarks below it say how and why.
"""


def page(trace: Trace) -> str:
    """The whole page."""
    parts = [
        HEAD.format(
            draft=trace.draft.name,
            target=trace.target.name,
            prompts=len(trace.prompts),
            tokens=sum(prompt.target_ids.size for prompt in trace.prompts),
        )
    ]
    for name in STUDIES:
        began_s = time.monotonic()
        parts.append(study(name)(trace).markdown())
        print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(read(SHIPPED)))
