"""`python -m serve_app.bench [control|overhead|lossless]`; without a name, all."""

from __future__ import annotations

import sys

from serve_app.bench import control, lossless, overhead

BENCHMARKS = {"control": control.run, "overhead": overhead.run, "lossless": lossless.run}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
