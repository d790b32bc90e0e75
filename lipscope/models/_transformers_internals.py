"""Private or undocumented interfaces of transformers that models relies on, in one place.

None of them is promised to stay. Each was tested with transformers 5.22.2; on an upgrade, this
is the file to look at first, and `tests/models/test_transformers_internals.py` the test to run.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.masking_utils import sdpa_mask as sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING

ATTENTION = "_attn_implementation_internal"
EXPERTS = "_experts_implementation_internal"
"""Where a configuration stores the chosen implementations.

Written directly: the setters validate, warn and propagate to sub-configurations.
"""


def attention_in_force(config: PretrainedConfig) -> Any:
    """The attention implementation that a module with this configuration will run."""
    return config._attn_implementation


def random_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model with random weights by its own rule; the public constructor skips dtypes."""
    return kind._from_config(config, dtype=dtype, attn_implementation="eager")


def buffer_dtypes(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes of the buffers of a transformers model, by name, if it is built in `dtype`."""
    if not isinstance(module, PreTrainedModel):
        return {}
    try:
        with torch.device("meta"):
            built = random_model(type(module), copy.deepcopy(module.config), dtype)
    except Exception:  # an encoder that its model builds with more than a configuration
        return {}
    return {name: buffer.dtype for name, buffer in built.named_buffers()}
