"""Layer lists: what other tools match is what the budget names."""

import re
from fnmatch import fnmatch

import pytest

import lipscope as ls
from lipscope.probes.budget.layer_lists import layer_lists
from tests.probes.budget.tiny import some_ids, tiny


def test_every_tool_matches_the_layers_to_keep_and_no_others():
    model = tiny("llama_lm")
    budget = ls.error_budget(model, some_ids(1, 12), formats="int8,bf16,kv8", probes=2)
    kept = budget.keep_high("int8")
    assert 0 < len(kept) < 21
    lists = layer_lists(budget, "int8")
    (ignore,) = lists["llm-compressor"].values()  # rules are matched from the start of a name
    (wildcards,) = lists["modelopt"].values()
    (entries,) = lists["mlx"].values()
    for name, _ in model.named_modules():
        wanted = name in kept
        assert wanted == any(
            re.match(rule.removeprefix("re:"), name) is not None for rule in ignore
        )
        assert wanted == any(fnmatch(name, rule) for rule in wildcards)
        assert wanted == (name in entries)
    for other in ("bf16", "kv8"):
        with pytest.raises(ls.UserError, match="does not round the weights of single layers"):
            layer_lists(budget, other)
