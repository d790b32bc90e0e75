"""The character language model of `lipscope train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

_CONTENTS = {"train_character_model": "training"}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = ["train_character_model"]

if TYPE_CHECKING:
    from lipscope.papers.charlm.training import train_character_model as train_character_model
