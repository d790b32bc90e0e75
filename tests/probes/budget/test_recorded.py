"""Runs of other engines: files of hidden states in several kinds, and modules of no library."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lipscope as ls
from lipscope.probes.budget import comparing as recorded
from lipscope.probes.budget.comparing import read_recorded
from tests.probes.budget.tiny import some_ids, tiny

IDS = some_ids(2, 24)


def in_bf16(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def dump(model, before_norm=False):
    """The hidden states of a model, by the names of a file."""
    seen = []
    blocks = getattr(model, "layers", None) or model.h
    handle = blocks[-1].register_forward_hook(lambda part, args, y: seen.append(y))
    with torch.no_grad():
        states = list(model(IDS, output_hidden_states=True).hidden_states)
    handle.remove()
    if before_norm:
        states[-1] = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    return {f"hidden_states.{i}": h.contiguous() for i, h in enumerate(states)}


def as_numpy(tensors):
    return {
        name: x.float().numpy() if x.is_floating_point() else x.numpy()
        for name, x in tensors.items()
    }


@pytest.mark.wide
def test_states_before_the_final_norm_are_recognised(tmp_path):
    path = tmp_path / "states.safetensors"
    states = dump(in_bf16(tiny("llama")), before_norm=True)
    save_file({**states, "input_ids": IDS}, path)
    found = ls.check_run(tiny("llama"), path, probes=4)
    assert found.ok and found.before_norm and found.as_dict()["before_norm"]
    assert "recognised as taken before the final norm" in found.sentence()
    # A wrong port with the same convention is wrong at its layer, by the same convention.
    wrong = in_bf16(tiny("llama"))
    wrong.layers[2].mlp.down_proj.weight.data.neg_()
    save_file({**dump(wrong, before_norm=True), "input_ids": IDS}, path)
    found = ls.check_run(tiny("llama"), path, probes=4)
    assert found.first_outside.name == "layer 2" and found.before_norm
    save_file({**dump(in_bf16(tiny("llama"))), "input_ids": IDS}, path)
    found = ls.check_run(tiny("llama"), path, probes=4)
    assert found.ok and not found.before_norm and "final norm" not in found.sentence()


def test_a_live_model_without_its_final_norm_is_wrong():
    port = in_bf16(tiny("llama"))
    port.norm = nn.Identity()
    found = ls.check_run(tiny("llama"), port, IDS, probes=4)
    assert found.first_outside.name == "layer 2" and not found.before_norm


@pytest.mark.parametrize("kind", ["npz", "stacked npz", "npy"])
def test_numpy_files_are_read_as_safetensors_are(tmp_path, kind):
    states = as_numpy(dump(in_bf16(tiny("gpt2"))))
    stacked = np.stack(list(states.values()))
    path = tmp_path / f"states.{kind.split()[-1]}"
    if kind == "npy":
        np.save(path, stacked)
    elif kind == "npz":
        np.savez(path, **states, input_ids=IDS.numpy().astype(np.int32))
    else:
        np.savez_compressed(path, hidden_states=stacked, input_ids=IDS.numpy())
    text = IDS if kind == "npy" else None
    found = ls.check_run(tiny("gpt2"), path, text, probes=4)
    # float32 numbers that are all bf16 numbers are those of a run in bf16.
    assert found.ok and found.format == "bf16"
    saved = ls.check_run(tiny("gpt2"), in_bf16(tiny("gpt2")), IDS, probes=4)
    assert [s.observed for s in found.states] == [s.observed for s in saved.states]


def test_bfloat16_arrays_of_jax_are_read(tmp_path):
    x = torch.randn(3, 2, 4, 8).bfloat16()
    raw = x.view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "a.npz", hidden_states=raw)
    found = read_recorded(tmp_path / "a.npz")
    assert found.format == "bf16" and all(map(torch.equal, found.states, x))


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")],
)
def test_the_format_is_the_narrowest_that_holds_the_states(tmp_path, dtype, format):
    x = torch.randn(3, 2, 4, 8).to(dtype)
    for stored in (x, x.float(), x.double()):
        found = recorded.RecordedRun(Path(), list(stored), None)
        assert found.format == format
    wide = recorded.RecordedRun(Path(), list(torch.rand(3, 2, 4, 8, dtype=torch.float64)), None)
    assert wide.format == "float64"


class Bomb:
    def __reduce__(self):
        return (open, ("ran", "w"))


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_pickles_are_never_opened(tmp_path, suffix, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"states.{suffix}"
    objects = np.array({"hidden_states.0": Bomb()}, dtype=object)
    if suffix == "npy":
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "|O", "fortran_order": False, "shape": ()}
            )
            file.write(pickle.dumps(objects))
    else:
        np.savez(path, **{"hidden_states.0": objects})
    with pytest.raises(ls.UserError, match=r"numpy.savez writes arrays that need no pickle"):
        ls.check_run(tiny("gpt2"), path)
    assert not (tmp_path / "ran").exists()


def test_messages_name_shapes_that_are_in_the_file(tmp_path):
    states = dump(in_bf16(tiny("gpt2")))
    first = {name: states[name] for name in ("hidden_states.0", "hidden_states.1")}
    narrow = {"hidden_states.1": states["hidden_states.1"][:, :, :8].contiguous()}
    path = tmp_path / "part.safetensors"
    for tensors, message in (
        (
            {**first, "input_ids": IDS},
            r"2 of shape \[2, 24, 32\], and 4 of shape \[2, 24, 32\] expected",
        ),
        (
            {**states, **narrow, "input_ids": IDS},
            r"\[2, 24, 32\] and \[2, 24, 8\], and 4 of shape \[2, 24, 32\]",
        ),
        (
            {**states, "input_ids": IDS[:, :5].contiguous()},
            r"shape \[2, 24\], as the hidden states are, got int64 \[2, 5\]",
        ),
        ({"hidden_states.0": torch.ones(2, 3)}, r"hidden_states.0 in .* got float32 \[2, 3\]"),
        ({"x": IDS}, "must hold hidden_states"),
    ):
        save_file(tensors, path)
        with pytest.raises(ls.UserError, match=message):
            ls.check_run(tiny("gpt2"), path)
    for name, data, message in (
        ("states.pt", b"x", "is a file, and hidden states are read from"),
        ("bad.npz", b"PK\x03\x04 no zip", r"cannot read .*bad.npz as npz"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ls.UserError, match=message):
            ls.check_run(tiny("gpt2"), tmp_path / name)


@pytest.mark.parametrize("wrong", [-1, 60, 10**12])
def test_token_ids_are_checked_against_the_vocabulary(tmp_path, wrong):
    ids = IDS.clone()
    ids[1, 3] = wrong
    path = tmp_path / "states.safetensors"
    save_file({**dump(in_bf16(tiny("gpt2"))), "input_ids": ids}, path)
    with pytest.raises(ls.UserError, match=f"token id {wrong} is not in the vocabulary"):
        ls.check_run(tiny("gpt2"), path)
    with pytest.raises(ls.UserError, match=f"token id {wrong} is not in the vocabulary"):
        ls.error_budget(tiny("gpt2"), ids)


class OwnPort(nn.Module):
    """A port without transformers: the weights of a model in a loop of its owner's."""

    def __init__(self, model, head=False):
        super().__init__()
        self.embed, self.positions, self.blocks = model.wte, model.wpe, model.h
        self.norm, self.head = model.ln_f, head

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        n = ids.shape[1]
        mask = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        for block in self.blocks:
            x = block(x, attention_mask=mask)
            x = x if isinstance(x, torch.Tensor) else x[0]
        return self.norm(x) @ self.embed.weight.mT if self.head else self.norm(x)


@pytest.mark.parametrize("head", [False, True])
def test_a_live_module_of_no_library_is_compared(head):
    port = OwnPort(in_bf16(tiny("gpt2")), head)
    found = ls.check_run(tiny("gpt2"), port, IDS, probes=4)
    assert found.ok and found.format == "bf16" and found.before_norm == head
    wrong = copy.deepcopy(port)
    wrong.blocks[1].mlp.c_proj.weight.data.neg_()
    assert ls.check_run(tiny("gpt2"), wrong, IDS, probes=4).first_outside.name == "layer 1"


def test_a_live_module_whose_states_cannot_be_had_is_told_to_save_them():
    flat = nn.Sequential(nn.Embedding(60, 32), nn.Linear(32, 32))
    with pytest.raises(ls.UserError, match=r"output_hidden_states=True, with safetensors"):
        ls.check_run(tiny("gpt2"), flat, IDS)

    class Closed(nn.Module):
        def forward(self, ids, more):
            return ids

    with pytest.raises(
        ls.UserError, match=r"Closed does not run in float32 on these inputs .* save"
    ):
        ls.check_run(tiny("gpt2"), Closed(), IDS)
