"""The colours of pages and figures: one palette, for light and dark paper."""

from __future__ import annotations

from functools import cache

LEVELS = 32
"""Number of steps of a colour ramp."""

FIRST_LINE = 21
"""The first step of a ramp with a contrast of 3 with the paper, which a line needs."""

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f5f7f9",
    "ink": "#1b1f24",
    "muted": "#57606a",
    "line": "#d5dae0",
    "accent": "#0b57a4",
}
DARK = {
    "paper": "#14171b",
    "panel": "#1d2228",
    "ink": "#e6e9ed",
    "muted": "#a3acb7",
    "line": "#343b44",
    "accent": "#7fb7f0",
}

# Found by a search: every pair differs by at least 23 in CIELAB for normal, protan, deutan and
# tritan eyes, and each has a contrast of 4.5 with its paper. Markers tell them apart as well.
SERIES_LIGHT = ("#0140bc", "#c03f00", "#137f59", "#510775", "#603218", "#b94293", "#1e2334")
SERIES_DARK = ("#5e90ff", "#f57233", "#45c77c", "#a3a9eb", "#ffe466", "#e898b8", "#ddffe1")

MARKERS = "os^DvPX*"
MARKER_TEXTS = "●■▲◆▼✚✖★"
"""The markers of matplotlib, and the same shapes as characters for legends."""

# Monotone lightness: readable in greyscale and by colour-blind eyes. Small values are close to the
# colour of the paper, large ones far from it, so that both schemes show the same picture.
_RAMPS = {
    "light": "#f7fbff #deebf7 #c6dbef #9ecae1 #6baed6 #3182bd #08519c #08306b",
    "dark": "#1d2228 #24365a #48506c #6e6e72 #948d76 #beae6b #e4ce58 #ffea46",
}
# Ratios around 1: blue below, orange above, the colour of the paper in the middle.
_RATIOS = {"light": "#2d6fb3 #f4f4f4 #c8591a", "dark": "#4c90d6 #2b3037 #e0752f"}

Rgb = tuple[int, int, int]


@cache
def colours(dark: bool = False) -> dict[str, str]:
    """Every colour by name: ink, s0 (series), c0 to c31 (ramp), v0 to v31 (ratios)."""
    scheme = "dark" if dark else "light"
    ramp = _RAMPS[scheme].split()
    ratio = _RATIOS[scheme].split()
    return {
        **(DARK if dark else LIGHT),
        **{f"s{i}": c for i, c in enumerate(SERIES_DARK if dark else SERIES_LIGHT)},
        **{f"c{i}": _mix(ramp, i / (LEVELS - 1)) for i in range(LEVELS)},
        **{f"v{i}": _mix(ratio, i / (LEVELS - 1)) for i in range(LEVELS)},
    }


def colour(name: str) -> str:
    """A colour on light paper, for matplotlib; on a page, its CSS variable takes its place."""
    return colours()[name]


def series(i: int, count: int) -> str:
    """The name of the colour of curve i of `count`: distinct if there are few, else by depth."""
    if count <= len(SERIES_LIGHT):
        return f"s{i}"
    return f"c{FIRST_LINE + round((LEVELS - 1 - FIRST_LINE) * i / (count - 1))}"


def distinct(i: int) -> tuple[str, str]:
    """The colour and the line style of curve i, where curves have no order such as depth."""
    return f"s{i % len(SERIES_LIGHT)}", ("-", "--", ":")[i // len(SERIES_LIGHT) % 3]


def marker(i: int) -> tuple[str, str]:
    """The marker of curve i, for matplotlib and as a character."""
    return MARKERS[i % len(MARKERS)], MARKER_TEXTS[i % len(MARKER_TEXTS)]


def level(share: float) -> int:
    """The step of a ramp for a number between 0 and 1."""
    return round(min(max(share, 0.0), 1.0) * (LEVELS - 1))


def css() -> str:
    """The palette as CSS: variables for both schemes, and classes for cells and their text."""
    light, dark = (_variables(scheme) for scheme in (False, True))
    steps = "".join(
        f".{kind}{i}{{--cell:var(--{kind}{i});--on:var(--{kind}t{i})}}"
        for kind in "cv"
        for i in range(LEVELS)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{steps}\n"
    )


def _variables(dark: bool) -> str:
    found = dict(colours(dark))
    for kind in "cv":
        found |= {f"{kind}t{i}": text_on(found[f"{kind}{i}"]) for i in range(LEVELS)}
    return ";".join(f"--{name}:{value}" for name, value in found.items())


def text_on(background: str) -> str:
    """Black or white, whichever contrasts more; the better of the two is always above 4.5."""
    dark, light = (contrast(ink, background) for ink in ("#000000", "#ffffff"))
    return "#000000" if dark >= light else "#ffffff"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.1, from 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(text: str) -> float:
    linear = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _rgb(text))
    )
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _rgb(text: str) -> Rgb:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _mix(stops: list[str], share: float) -> str:
    at = share * (len(stops) - 1)
    i = min(int(at), len(stops) - 2)
    low = _rgb(stops[i])
    high = _rgb(stops[i + 1])
    return "#" + "".join(
        f"{round(a + (at - i) * (b - a)):02x}" for a, b in zip(low, high, strict=True)
    )
