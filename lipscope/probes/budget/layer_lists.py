"""Layers to keep in high precision, as the configuration of other tools.

Names are those of the model that was given, its `named_modules()`; a weight that belongs to no
linear layer (experts in one tensor) has the name of its parameter. llm-compressor and ModelOpt
match the end of a name; MLX wants the whole name.
"""

from __future__ import annotations

import re
from typing import Any

from lipscope._types import UserError
from lipscope.probes.budget.formats import DTYPES
from lipscope.probes.budget.result import ErrorBudget

KINDS = ("weight", "activation")
"""What is rounded at a site whose name is that of a module."""


def layer_lists(budget: ErrorBudget, format: str, share: float = 0.5) -> dict[str, Any]:
    """The sites that make this share of a format's squared error, for each tool.

    Returns:
        For llm-compressor the `ignore` of a QuantizationModifier, for ModelOpt entries of
        `quant_cfg`, for MLX entries of `quantization` in config.json.
    """
    modules = {
        row.site
        for row in budget.rows
        if row.format == format and row.kind in KINDS and format not in DTYPES
    }
    names = [n for n in dict.fromkeys(budget.keep_high(format, share)) if n in modules]
    if not names:
        raise UserError(
            f"the format {format} does not round the weights of single layers; layer lists are for "
            "formats such as int8, int4:32, fp8 and w8a8"
        )
    return {
        "llm-compressor": {"ignore": [f"re:.*{re.escape(name)}$" for name in names]},
        "modelopt": {"quant_cfg": {f"*{name}*": {"enable": False} for name in names}},
        "mlx": {"quantization": dict.fromkeys(names, False)},
    }
