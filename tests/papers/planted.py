"""Claims of a test, in place of those of the papers."""

from lipscope.papers.claims import Claim, judged


def claim(run, judge=None, id="C1", needs="nothing"):
    return Claim(
        id=id,
        says="two is two",
        needs=needs,
        run=run,
        judge=judge or (lambda numbers, quoted: judged(numbers["x"] == 2, "x against 2", (1, 3))),
    )
