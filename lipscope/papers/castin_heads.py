"""Castin et al., statements about tokens: adversarial inputs on real heads, and the theorems.

C30 to C33 rebuild the inputs of the released script, on the map that it differentiates and on the
head alone; C34 tests the bound that it returns; S1 to S4 are theorems of the slides.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import median, quantiles

import torch
from torch import Generator, Tensor

from lipscope import Ball
from lipscope.attack.constructions import explicit_inputs, regime
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver
from lipscope.models.model import Model
from lipscope.papers.castin_text import released_statistic
from lipscope.papers.claims import QUOTED, Claim, Numbers, Quoted, Verdict, judged, power_law
from lipscope.papers.page import Line, Picture, columns
from lipscope.papers.setting import Setting
from lipscope.theorems.castin2024 import large_radius_limit, theorem_witness
from lipscope.theorems.registry import bounds

BY_EYE = 0.05
"""Accuracy of an exponent that was drawn by eye through points."""

STRAIGHT = 0.1
"""Largest residual, in log σ, of what is drawn as a power of n."""

FROM = 7
"""Shortest length of an exponent: below, sqrt(n) and sqrt(n - 1) are different curves."""


def sigma(f: SelfAttention, X: Tensor, seed: int = 0) -> float:
    """The constant at one input."""
    found = local_lipschitz(f, X, solver=Solver(seed=seed))
    return float(found.value)


def closed_layer(model: Model, layer: int, n: int = 8) -> SelfAttention:
    """The attention of a layer with its output projection, in closed form."""
    ids = torch.arange(1000, 1000 + n)[None]
    (site,) = model.sites(ids, scopes=["attention"], layers=[layer])
    assert isinstance(site.f, SelfAttention)
    return site.f.to("cpu")


def wrong_slice(f: SelfAttention, h: int) -> SelfAttention:
    """Head h as the released script cuts it out of GPT-2: rows of a weight stored [in, out]."""
    size = f.Q.shape[0] // f.heads
    own = slice(h * size, (h + 1) * size)
    cut = {name: getattr(f, name).T[own] for name in "QKV"}
    return replace(f, **cut, O=None, heads=1, kv_heads=None, biases=None)


def right_slice(f: SelfAttention, h: int) -> SelfAttention:
    """Head h without its biases."""
    return replace(f.head(h), biases=None)


def run_adversarial(id: str, model: str, setting: Setting) -> Numbers:
    """The adversarial inputs of one head, measured on the whole layer and on the head."""
    quoted = QUOTED[id]
    random = int(quoted["seed"]) if "seed" in quoted.values else None
    loaded, _ = setting.model(model, random_init=random, causal=id == "C31")
    layer = 0 if quoted["layer"] == 0 else min(6, loaded.layers // 2)
    gpt = model == "gpt2"
    f = closed_layer(loaded, layer)
    # BERT's `attention.self` has no output projection, and is called without a mask.
    whole = f if gpt else replace(f, O=None, causal=False, mask=None)
    h = int(quoted["head"])
    slices = {"right slice": right_slice(f, h)}
    if gpt:
        slices["released slice"] = wrong_slice(f, h)
    lengths = [2, 7, 12, 22, 47, 97] if setting.quick else list(range(2, 100, 5))
    rows: list[dict[str, object]] = []
    for n in setting.track(lengths):
        for name, head in slices.items():
            X = theorem_witness(replace(head, causal=False, mask=None), Ball(quoted["R"], n))
            value = whole(X[None])
            rows.append(
                {
                    "n": n,
                    "slice": name,
                    "sigma": sigma(whole, X, setting.seed),
                    "statistic": released_statistic(whole, X[None], value).item(),
                    "head": sigma(right_slice(whole, h), X, setting.seed),
                }
            )
    gammas = {name: regime(head, quoted["R"]).reach for name, head in slices.items()}
    return {"rows": rows, "reach": gammas, "released": "released slice" if gpt else "right slice"}


def judge_adversarial(numbers: Numbers, quoted: Quoted) -> Verdict:
    """Whether sigma of the released map grows like the square root of n."""
    cuts = list(numbers["reach"])
    fits = {
        (cut, kind): power_law(
            [(r["n"], r[kind]) for r in numbers["rows"] if r["slice"] == cut and r["n"] >= FROM]
        )
        for cut in cuts
        for kind in ("sigma", "statistic", "head")
    }
    own = fits[numbers["released"], "sigma"]
    found = "; ".join(
        f"{cut}: σ of the layer n^{fits[cut, 'sigma'].alpha:.2f} (rms "
        f"{fits[cut, 'sigma'].rms:.2f}), released statistic n^{fits[cut, 'statistic'].alpha:.2f}, "
        f"σ of the head alone n^{fits[cut, 'head'].alpha:.2f}, "
        f"2γR² = {numbers['reach'][cut]:.3g}"
        for cut in cuts
    )
    follows = {
        place: abs(fit.alpha - quoted["exponent"]) <= BY_EYE and fit.rms <= STRAIGHT
        for place, fit in fits.items()
    }
    holds = follows[numbers["released"], "sigma"]
    if own.rms > STRAIGHT:
        found += f"; a residual (rms) above {STRAIGHT:g} in log σ is not a power of n"
    return judged(holds, f"quoted √n; {found}{_cause(numbers, follows)}", own.interval)


def _cause(numbers: Numbers, follows: dict[tuple[str, str], bool]) -> str:
    """Whether the head alone follows the square root of n, and what decides σ of its layer."""
    cut = numbers["released"]
    if not follows["right slice", "head"]:
        return "; the head alone does not follow √n"
    if cut != "right slice":
        # The head may follow at its own inputs, and not at those that the script builds.
        at_released = "does too" if follows[cut, "head"] else "does not"
        return (
            "; at the inputs of its own slice the head alone follows √n, at those of the released "
            f"slice it {at_released}"
        )
    ratios = [r["sigma"] / r["head"] for r in numbers["rows"] if r["n"] >= FROM]
    return (
        f"; the head alone follows √n, and σ of the layer is {min(ratios):.2g} to "
        f"{max(ratios):.2g} times as large"
        # Squares add up over the heads: from here on the head is the smaller part.
        + (": other heads and the biases decide it" if min(ratios) > math.sqrt(2) else "")
    )


def plot_adversarial(id: str, numbers: Numbers) -> Picture:
    quoted = QUOTED[id]
    lines = []
    for cut in numbers["reach"]:
        rows = [r for r in numbers["rows"] if r["slice"] == cut]
        labels = {"sigma": "σ of the layer", "statistic": "√‖Jᵀf‖", "head": "σ of the head"}
        lines += columns(rows, "n", {key: f"{label}, {cut}" for key, label in labels.items()})
    n = sorted({r["n"] for r in numbers["rows"]})
    curve = [quoted["constant"] * math.sqrt(x) for x in n]
    lines.append(Line(f"drawn in the paper: {quoted['constant']:g} √n", n, curve, "dashes"))
    return Picture("Adversarial inputs", "n, tokens", "constant", lines)


def released_bound(f: SelfAttention, X: Tensor) -> float:
    """sum_h ||V_h|| (R_h^2 r^2 (n + 1) + n)^(1/2), what the released `compute_bound` returns.

    r is the diameter of the tokens and R_h = max_i |A_h x_i|.
    """
    n = len(X)
    r = torch.cdist(X, X).max().item()
    total = 0.0
    for h in range(f.heads):
        head = f.head(h)
        A = head.K.T @ head.Q / math.sqrt(head.Q.shape[0])
        reach = (X @ A.T).norm(dim=1).max().item()
        size = torch.linalg.matrix_norm(head.V, 2).item()
        total += size * math.sqrt(reach**2 * r**2 * (n + 1) + n)
    return total


def blind_input(head: SelfAttention, R: float, n: int) -> Tensor:
    """Tokens +-R u that A maps to zero, in a direction in which A still points.

    The bound of the script knows A only through |A x_i|; the derivative in the query is C_i A.
    """
    A = head.K.T @ head.Q / math.sqrt(head.Q.shape[0])
    left, values, right = torch.linalg.svd(A)
    rank = int((values > 1e-10 * values[0]).sum())
    kernel = right[rank:]
    u = kernel.T @ (kernel @ left[:, 0]) if len(kernel) else left[:, 0]
    u = u / u.norm()
    signs = torch.ones(n, 1, dtype=A.dtype, device=A.device)
    signs[1::2] = -1
    return R * signs * u


def run_released_bound(setting: Setting) -> Numbers:
    """The formula on whole layers with their biases, and on each head alone without them."""
    model, _ = setting.model("bert-base-uncased")
    layers = [0, model.layers // 2] if setting.quick else list(range(model.layers))
    rows = []
    for layer in setting.track(layers):
        f = replace(closed_layer(model, layer), O=None)
        for h in range(0, f.heads, 4) if setting.quick else range(f.heads):
            alone = right_slice(f, h)
            for R in (1.0, 15.5):
                crowd = theorem_witness(alone, Ball(R, 16))
                cases = (
                    ("whole layer", f, "one against a crowd", crowd),
                    ("one head", alone, "one against a crowd", crowd),
                    ("one head", alone, "invisible to A", blind_input(alone, R, 16)),
                )
                rows += [
                    {"layer": layer, "head": h, "R": R, "map": name, "input": words}
                    | {"sigma": sigma(g, X, setting.seed), "bound": released_bound(g, X)}
                    for name, g, words, X in cases
                ]
    return {"rows": rows}


def judge_released_bound(numbers: Numbers, quoted: Quoted) -> Verdict:
    ratios = [(r["sigma"] / r["bound"], r) for r in numbers["rows"]]
    worst, row = max(ratios, key=lambda pair: pair[0])
    broken = sum(ratio > 1 for ratio, _ in ratios)
    by_input = ", ".join(
        f"{sum(ratio > 1 for ratio, r in ratios if r['input'] == words)} of "
        f"{sum(r['input'] == words for _, r in ratios)} at tokens {words}"
        for words in dict.fromkeys(r["input"] for _, r in ratios)
    )
    reason = (
        f"σ exceeds the bound in {broken} of {len(ratios)} cases ({by_input}), by up to "
        f"{worst:.3g} times ({row['map']}, layer {row['layer']}, head {row['head']}, "
        f"R = {row['R']:g}, tokens {row['input']}); "
        "it knows A only through |A xᵢ|, which is 0 at tokens invisible to A"
    )
    if not broken:
        reason = f"σ is at most {worst:.3g} times the bound in {len(ratios)} cases"
    return judged(broken == 0, reason, (min(ratio for ratio, _ in ratios), worst))


def _random_heads(setting: Setting, count: int, d: int = 6, k: int = 4) -> list[SelfAttention]:
    g = Generator().manual_seed(setting.seed)
    I = torch.eye(d, dtype=torch.float64)
    weights = [torch.randn(2, k, d, generator=g, dtype=torch.float64) for _ in range(count)]
    return [SelfAttention(Q, K, I) for Q, K in weights]


def run_theorems(setting: Setting) -> Numbers:
    """Upper and lower bound and the inputs of the proof, full, masked and with several heads."""
    rows = []
    count = 4 if setting.quick else 40
    g = Generator().manual_seed(setting.seed + 1)
    for f in setting.track(_random_heads(setting, count)):
        Q, K, V = torch.randn(3, 8, 6, generator=g, dtype=torch.float64)
        O = torch.randn(6, 8, generator=g, dtype=torch.float64)
        layers = {
            "one head": f,
            "masked": replace(f, causal=True),
            "two heads": SelfAttention(Q, K, V, O=O, heads=2),
        }
        for name, layer in layers.items():
            for R, n in ((0.5, 4), (2.0, 16), (4.0, 64)):
                ball = Ball(R, n)
                found = {row.name: row.value for row in bounds(layer, ball)}
                row = {"case": name, "R": R, "n": n, "upper": found["Castin et al., ball"]}
                row["lower"] = found.get("Castin et al., ball, from below")
                row["witness"] = None
                if row["lower"] is not None:
                    row["witness"] = sigma(layer, theorem_witness(layer, ball), setting.seed)
                inputs = explicit_inputs(layer, ball, seed=setting.seed)
                rows.append(row | {"largest": max(one.value for one in inputs)})
    return {"rows": rows}


def judge_theorems(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    above = [r for r in rows if r["largest"] > r["upper"] * (1 + 1e-9)]
    below = [r for r in rows if r["lower"] is not None and r["witness"] < r["lower"] * (1 - 1e-9)]
    tight = max(r["largest"] / r["upper"] for r in rows)
    reason = (
        f"{len(rows)} layers and balls, full, masked and multi-head: the upper bound is exceeded "
        f"in {len(above)}, the lower bound not reached at its input in {len(below)}; the largest σ "
        f"found is up to {tight:.2f} of the upper bound"
    )
    return judged(not above and not below, reason)


def run_regimes(setting: Setting) -> Numbers:
    """gamma R^2 of every head of BERT, R the largest token of the text that reaches the layer."""
    model, _ = setting.model("bert-base-uncased")
    words, _ = setting.text("alice")
    n = 64 if setting.quick else 128
    ids = torch.tensor(model.encode(words)[:n])[None]
    table = []
    for layer in setting.track(range(model.layers)):
        (site,) = model.sites(ids, scopes=["attention"], layers=[layer])
        assert isinstance(site.f, SelfAttention)
        f = site.f.to("cpu")
        R = site.radius.max().item()
        table.append([regime(right_slice(f, h), R).reach / 2 for h in range(f.heads)])
    return {"table": table, "n": n}


def judge_regimes(numbers: Numbers, quoted: Quoted) -> Verdict:
    values = [x for line in numbers["table"] for x in line]
    inside = sum(quoted["low"] <= x <= quoted["high"] for x in values)
    low, _, high = quantiles(values, n=4)
    reason = (
        f"γR² of {len(values)} heads: median {median(values):.3g}, "
        f"{min(values):.3g} to {max(values):.3g}; {inside} of {len(values)} lie between "
        f"{quoted['low']:g} and {quoted['high']:g}; 2γR², also quoted, has the median "
        f"{2 * median(values):.3g}"
    )
    return judged(quoted["low"] <= median(values) <= quoted["high"], reason, (low, high))


def plot_regimes(numbers: Numbers) -> Picture:
    table = numbers["table"]
    rows = [[f"layer {i}", *(f"{x:.3g}" for x in line)] for i, line in enumerate(table)]
    head = ["γR²", *(f"head {h}" for h in range(len(table[0])))]
    return Picture("γR² of every head", columns=head, rows=rows)


RADII = (2.0, 4.0, 8.0, 16.0, 32.0)


def run_quadratic(setting: Setting) -> Numbers:
    """One token at zero among tokens at +-R u, for several radii."""
    rows = []
    for i, f in enumerate(_random_heads(setting, 3 if setting.quick else 20)):
        for R in RADII:
            found = explicit_inputs(f, Ball(R, 9), seed=setting.seed)
            value = next(one.value for one in found if one.name.startswith("token at zero"))
            rows.append({"head": i, "R": R, "sigma": value})
    return {"rows": rows}


def judge_quadratic(numbers: Numbers, quoted: Quoted) -> Verdict:
    fits = [
        power_law([(r["R"], r["sigma"]) for r in numbers["rows"] if r["head"] == i])
        for i in {r["head"] for r in numbers["rows"]}
    ]
    low = min(f.alpha for f in fits)
    high = max(f.alpha for f in fits)
    reason = f"σ grows like R^{low:.3f} to R^{high:.3f} over {len(fits)} random heads"
    return judged(abs(low - 2) <= BY_EYE and abs(high - 2) <= BY_EYE, reason, (low, high))


def plot_by_radius(numbers: Numbers) -> Picture:
    lines = []
    for i in sorted({r["head"] for r in numbers["rows"]})[:4]:
        rows = [r for r in numbers["rows"] if r["head"] == i]
        lines += columns(rows, "R", {"sigma": f"head {i}"})
    curve = [lines[0].y[0] * (R / RADII[0]) ** 2 for R in RADII]
    lines.append(Line("R²", RADII, curve, "dashes"))
    return Picture("One token at zero", "R", "σ", lines)


def run_large_radius(setting: Setting) -> Numbers:
    """sigma at R X against its limit ||V|| sqrt(max_j #{i : m_i = j})."""
    g = Generator().manual_seed(setting.seed)
    rows = []
    for f in _random_heads(setting, 10 if setting.quick else 100, d=3, k=3):
        X = torch.randn(5, 3, generator=g, dtype=torch.float64)
        A = f.K.T @ f.Q / math.sqrt(3)
        scores = X @ A.T @ X.T
        top = scores.topk(2, dim=1)
        gap = (top.values[:, 0] - top.values[:, 1]).min().item()
        agree = len(top.indices[:, 0].unique()) == 1
        # Far enough that the second score has no weight left: R^2 gap = 60.
        R = math.sqrt(60 / gap)
        errors = [
            abs(sigma(f, s * R * X, setting.seed) / large_radius_limit(f, X) - 1)
            for s in (0.25, 0.5, 1.0)
        ]
        rows.append(
            {"limit": large_radius_limit(f, X), "n": 5, "agree": agree, "R": R, "errors": errors}
        )
    return {"rows": rows}


def judge_large_radius(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    worst = max(r["errors"][-1] for r in rows)
    # V = I: the largest possible value is sqrt(n), reached exactly where all m_i agree.
    wrong = [r for r in rows if (abs(r["limit"] - math.sqrt(r["n"])) < 1e-9) != r["agree"]]
    above = [r for r in rows if r["limit"] > math.sqrt(r["n"]) * (1 + 1e-12)]
    share = sum(r["agree"] for r in rows) / len(rows)
    reason = (
        f"{len(rows)} random heads and inputs: σ(RX) is within {worst:.1e} of the limit; the limit "
        f"is at most √n in all but {len(above)}, and equal to it exactly where all tokens choose "
        f"the same one in all but {len(wrong)} ({100 * share:.0f} % of the inputs)"
    )
    return judged(worst < 1e-6 and not wrong and not above, reason, (0.0, worst))


def _adversarial(id: str, model: str, where: str) -> Claim:
    return Claim(
        id,
        partial(run_adversarial, id, model),
        judge_adversarial,
        partial(plot_adversarial, id),
        needs="nothing" if id == "C32" else model,  # its weights are random
        says=f"{where}: adversarial σ grows like √n",
    )


BERT = "bert-base-uncased"
CLAIMS = [
    _adversarial("C30", BERT, "BERT, layer 0, head 0, R = 15.5"),
    _adversarial("C31", BERT, "BERT decoder, layer 6, head 7, R = 21.5"),
    _adversarial("C32", "gpt2", "random GPT-2, layer 6, head 0, R = 100"),
    _adversarial("C33", "gpt2", "GPT-2, layer 0, head 0, R = 10"),
    Claim("C34", run_released_bound, judge_released_bound, needs=BERT),
    Claim("S1", run_theorems, judge_theorems),
    Claim("S2", run_regimes, judge_regimes, plot_regimes, needs=f"{BERT}, Alice text"),
    Claim("S3", run_quadratic, judge_quadratic, plot_by_radius),
    Claim("S4", run_large_radius, judge_large_radius),
]
