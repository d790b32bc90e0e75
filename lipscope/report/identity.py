"""What tells studies apart: names for each of several, and what all of them share."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Sequence

from lipscope.report.formats import shown
from lipscope.study.study import Study

Facts = dict[str, str]
PRETRAINED = "pretrained"


def facts(study: Study) -> Facts:
    """What was measured, in words, the most telling fact first."""
    about = study.info.about
    identity = study.info.identity
    seed = random_seed(study)
    found = {
        "model": shown(about.model),
        "weights": PRETRAINED if seed is None else f"random weights (seed {seed})",
        "revision": shown(identity.revision or "none", 20),
        "text": shown(about.text, 60),
        "special tokens": "special tokens" if identity.special_tokens else "no special tokens",
        "dtype": shown(identity.dtype, 20),
        "device": shown(about.device, 20),
        "gap": "no gap" if identity.gap is None else f"gap {identity.gap:g}",
        "tolerance": f"tol {identity.tol:g}",
        "seed": f"seed {identity.seed}",
    }
    # Digests tell apart what has one name: two checkpoints of a directory, two versions of a file.
    return found | {
        "digest of the weights": f"weights {identity.weights[:8]}",
        "digest of the text": f"text {identity.text[:8]}",
        "configuration": f"configuration {identity.config[:8]}",
    }


def random_seed(study: Study) -> int | None:
    """The seed of random weights; None if the weights are those of the model."""
    return study.info.about.random_init


def labels(studies: Sequence[Study]) -> list[str]:
    """A name for each study that says what differs."""
    found = [facts(study) for study in studies]
    places = ["" if study.directory is None else study.directory.name for study in studies]
    return names(found, places)


def names(found: Sequence[Facts], places: Sequence[str]) -> list[str]:
    """A name for each study out of the facts that differ, and its place if they do not suffice."""
    chosen = telling(found)
    models = _without_shared_folder([own["model"] for own in found])
    found = [{**own, "model": model} for own, model in zip(found, models, strict=True)]
    given = [", ".join(own[name] for name in chosen) or own["model"] for own in found]
    repeated = {text for text, count in Counter(given).items() if count > 1}
    if not repeated:
        return given
    given = [
        f"{text}, {shown(place, 40)}" if text in repeated and place else text
        for text, place in zip(given, places, strict=True)
    ]
    seen: Counter[str] = Counter()
    again = Counter(given)
    final = []
    for text in given:
        seen[text] += 1
        final.append(f"{text} ({seen[text]})" if again[text] > 1 else text)
    return final


def _without_shared_folder(models: Sequence[str]) -> list[str]:
    """Checkpoints of one run have long paths, of which only the end differs."""
    if len(set(models)) < 2 or not all(map(os.path.isabs, models)):
        return list(models)
    folder = os.path.commonpath(models)
    # A run beside its own checkpoints: both keep the name of the run.
    folder = os.path.dirname(folder) if folder in models else folder
    return [os.path.relpath(model, folder) for model in models]


def telling(found: Sequence[Facts]) -> list[str]:
    """The fewest facts, from the most telling on, that tell apart what differs."""
    varying = [name for name in found[0] if len({own[name] for own in found}) > 1]
    chosen: list[str] = []
    groups = 1
    for name in varying:
        # A fact that splits no group further, such as a digest beside a name, adds only length.
        split = len({tuple(own[key] for key in (*chosen, name)) for own in found})
        if split > groups:
            chosen.append(name)
            groups = split
    return chosen


def shared(found: Sequence[Facts]) -> str:
    """Model, weights, text and dtype, as far as all studies have the same."""
    same = {name: own for name, own in found[0].items() if all(f[name] == own for f in found)}
    # Pretrained weights are what a reader expects; random ones are worth a word.
    told = {name: text for name, text in same.items() if text != PRETRAINED}
    what, on = (
        ", ".join(told[name] for name in pair if name in told)
        for pair in (("model", "weights"), ("text", "dtype"))
    )
    return " on ".join(filter(None, (what, on)))


def differing(found: Sequence[Facts]) -> list[str]:
    """The names of the facts that differ."""
    return [name for name in found[0] if len({own[name] for own in found}) > 1]
