"""Share of a study that is not solving, for the default workload; the target is under 25 %.

python benchmarks/overhead.py [LENGTHS]             # for instance 8,16,32
"""

from __future__ import annotations

import sys
import tempfile
import time

from lipscope.study.run import measure


def main() -> None:
    lengths = [int(n) for n in sys.argv[1].split(",")] if len(sys.argv) > 1 else None
    began: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        study = measure(
            lengths=lengths,
            out=f"{folder}/study",
            progress=lambda *_: began.append(time.perf_counter()),
        )
        wall = began[-1] - began[0]
        solving = sum(row.seconds for row in study.rows)
    share = 1 - solving / wall
    print(
        f"{len(study.rows)} values in {len(began) - 1} jobs: {wall:.1f} s, "
        f"of which {solving:.1f} s solving"
    )
    print(f"everything else: {100 * share:.1f} %   {'within' if share < 0.25 else 'OVER'} 25 %")


if __name__ == "__main__":
    main()
