"""Every number and statement that is quoted from the papers, with its source, in one table."""

from __future__ import annotations

from lipscope.reproduce.claims import Quoted

SCRIPT = "released scripts of Castin et al. (2024)"
SLIDES = "slides of Castin et al. (2024)"
FIRST = "first version of Castin et al. (2024)"
KIM = "Kim et al. (2021)"

CASTIN: dict[str, Quoted] = {}

KIM2021: dict[str, Quoted] = {}

QUOTED: dict[str, Quoted] = {**CASTIN, **KIM2021}
