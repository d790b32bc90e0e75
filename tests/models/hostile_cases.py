"""Ways to spoil a model folder, by name; each takes the folder and a random.Random.

None of them is larger than a few megabytes on disk: huge files are sparse, and what a folder would
do to its reader is seen by a canary, a file that the folder's code would write.
"""

import json
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Spoiler = Callable[[Path, random.Random], None]

CANARY = "lipscope-canary"
"""Name of the file, beside the folder, that code of the folder writes."""

FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "spiece.model",
)
SIZES = (
    "num_hidden_layers",
    "n_layer",
    "hidden_size",
    "n_embd",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
    "num_labels",
    "type_vocab_size",
    "num_experts",
    "num_local_experts",
    "chunk_size_feed_forward",
)
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    10**9,
    2**31,
    10**18,
    10**40,
    -(10**9),
    1e308,
    float("inf"),
    float("nan"),
    0.5,
    "x",
    "10",
    "",
    "\x1b[31mred",
    "owner/repo",
    "../../etc/passwd",
    [],
    [1],
    [None],
    [[]],
    {},
    {"a": 1},
    {"": []},
    [10**9] * 3,
    "a" * 100_000,
)


class Payload:
    """Unpickling it writes the canary."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


def canary(folder: Path) -> Path:
    return folder.parent / CANARY


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({**content, **changes}))


def fresh(path: Path) -> Path:
    """The path, with nothing there."""
    path.unlink(missing_ok=True)
    return path


def evil_code(folder: Path) -> None:
    code = f"open({str(canary(folder))!r}, 'w').close()\n"
    for name in ("evil.py", "configuration_evil.py", "modeling_evil.py", "__init__.py"):
        (folder / name).write_text(code)


# --- what lies there instead of a file


def a_link(target: str) -> Spoiler:
    def spoil(folder: Path, rng: random.Random) -> None:
        path = fresh(folder / rng.choice(FILES))
        outside = folder.parent / "outside.json"
        outside.write_text("{}")
        goal = {"outside": "../outside.json", "itself": path.name, "folder": ".."}.get(
            target, target
        )
        path.symlink_to(goal)

    return spoil


def a_chain_of_links(folder: Path, rng: random.Random) -> None:
    path = fresh(folder / rng.choice(FILES))
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("../../../../../../../etc/hostname")
    path.symlink_to("a")


def a_fifo(folder: Path, rng: random.Random) -> None:
    os.mkfifo(fresh(folder / rng.choice(FILES)))


def a_socket(folder: Path, rng: random.Random) -> None:
    path = fresh(folder / rng.choice(FILES))
    here = os.getcwd()
    os.chdir(folder)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


def a_folder(folder: Path, rng: random.Random) -> None:
    fresh(folder / rng.choice(FILES)).mkdir()


def a_sparse_file(folder: Path, rng: random.Random) -> None:
    path = fresh(folder / rng.choice(FILES))
    path.touch()
    os.truncate(path, rng.choice((10**9, 10**11, 10**13)))


def an_empty_file(folder: Path, rng: random.Random) -> None:
    fresh(folder / rng.choice(FILES)).touch()


def noise(folder: Path, rng: random.Random) -> None:
    fresh(folder / rng.choice(FILES)).write_bytes(rng.randbytes(rng.choice((1, 8, 1000, 10**5))))


# --- JSON


def nested(depth: int, opening: str, closing: str) -> Spoiler:
    def spoil(folder: Path, rng: random.Random) -> None:
        names = [name for name in FILES if name.endswith(".json")]
        names.append("model.safetensors.index.json")
        path = fresh(folder / rng.choice(names))
        if "index" in path.name:
            fresh(folder / "model.safetensors")
        path.write_text(opening * depth + "1" + closing * depth)

    return spoil


def nested_in_config(folder: Path, rng: random.Random) -> None:
    depth = rng.choice((70, 400, 900))
    text = (folder / "config.json").read_text().rstrip().rstrip("}")
    inner = '{"a":' * depth + "1" + "}" * depth
    fresh(folder / "config.json").write_text(text + f', "id2label": {inner}}}')


def not_json(folder: Path, rng: random.Random) -> None:
    name = rng.choice([name for name in FILES if name.endswith(".json")])
    content = rng.choice(
        (
            b"",
            b"{",
            b"[]",
            b"null",
            b"5",
            b'"text"',
            b"\xff\xfe{",
            b"\xef\xbb\xbf{}",
            b"{}\x00",
            b'{"a": ' + b"9" * 5000 + b"}",
            b'{"a": NaN}',
            b'{"a": 1e999}',
            b'{"\\ud800": 1}',
            b"{'a': 1}",
        )
    )
    fresh(folder / name).write_bytes(content)


def a_cut_file(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(("config.json", "tokenizer.json", "model.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def a_flipped_byte(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(("config.json", "tokenizer.json", "model.safetensors"))
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 20))):
        content[rng.randrange(min(len(content), 4000))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(content))


# --- configurations


def an_odd_entry(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in rng.sample(sorted(config), rng.choice((1, 1, 3))):
        config[key] = rng.choice(ODD)
    (folder / "config.json").write_text(json.dumps(config))


def a_huge_size(folder: Path, rng: random.Random) -> None:
    value = rng.choice((10**5, 10**6, 10**7, 10**9, 2**31 - 1, 2**62, 10**30))
    edit(folder / "config.json", **{rng.choice(SIZES): value})


def a_size_of_nothing(folder: Path, rng: random.Random) -> None:
    edit(folder / "config.json", **{rng.choice(SIZES): rng.choice((0, -1, -7, -(10**9)))})


def an_odd_type(folder: Path, rng: random.Random) -> None:
    kinds = (
        ["bert"],
        {"a": 1},
        5,
        "",
        "../x",
        "\x1b[31m",
        "a" * 10**5,
        True,
        "evil",
        "clip",
        "sam",
    )
    edit(folder / "config.json", model_type=rng.choice(kinds))


def another_type(folder: Path, rng: random.Random) -> None:
    kinds = ("bert", "gpt2", "llama", "t5", "vit", "mamba", "whisper", "opt", "bart", "dinov2")
    edit(folder / "config.json", model_type=rng.choice(kinds))


def an_odd_option(folder: Path, rng: random.Random) -> None:
    key = rng.choice(
        (
            "quantization_config",
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "dtype",
            "torch_dtype",
            "architectures",
            "id2label",
            "label2id",
            "hidden_act",
            "activation_function",
            "pad_token_id",
            "text_config",
            "sub_configs",
            "is_encoder_decoder",
            "tie_word_embeddings",
            "problem_type",
            "pruned_heads",
            "output_attentions",
            "return_dict",
            "base_model_tp_plan",
            "num_labels",
            "attribute_map",
            "name_or_path",
            "_commit_hash",
            "__class__",
            "from_dict",
            "__init__",
        )
    )
    value = rng.choice((*ODD, "os.system", {"rope_type": "evil"}, {"quant_method": "evil"}))
    edit(folder / "config.json", **{key: value})


def code_by_name(folder: Path, rng: random.Random) -> None:
    evil_code(folder)
    entries = {
        "auto_map": {
            "AutoConfig": "configuration_evil.Config",
            "AutoModel": "modeling_evil.Model",
            "AutoTokenizer": ["evil.Words", None],
        },
        "_attn_implementation": "owner/repo",
        "custom_pipelines": {"x": {"impl": "evil.Pipeline"}},
        "transformers_weights": "pytorch_model.bin",
        "tokenizer_class": "evil.Words",
        "trust_remote_code": True,
        "use_kernels": True,
    }
    keys = rng.sample(sorted(entries), rng.choice((1, 3, len(entries))))
    for name in ("config.json", "tokenizer_config.json"):
        edit(folder / name, **{key: entries[key] for key in keys})
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary(folder))))


# --- weights


def a_pickle_for_safetensors(folder: Path, rng: random.Random) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(canary(folder))))


def only_pickles(folder: Path, rng: random.Random) -> None:
    fresh(folder / "model.safetensors")
    name = rng.choice(("pytorch_model.bin", "model.pt", "model.pkl", "model.ckpt"))
    (folder / name).write_bytes(pickle.dumps(Payload(canary(folder))))


def an_odd_index(folder: Path, rng: random.Random) -> None:
    fresh(folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary(folder))))
    odd = (
        "../model.safetensors",
        "/etc/passwd",
        "pytorch_model.bin",
        "model-\x1b[31m.safetensors",
        "model-../x.safetensors",
        "model-1.safetensors",
        "model*.safetensors",
        "",
        5,
        None,
        [],
        {},
        "model" + "a" * 5000 + ".safetensors",
        "model\x00.safetensors",
        ".",
    )
    shards = rng.choice(({"a": rng.choice(odd), "b": rng.choice(odd)}, [], "x", None, 5, {}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def an_odd_header(folder: Path, rng: random.Random) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    headers: tuple[Any, ...] = (
        {"a": {**entry, "shape": [2**40, 2**40]}},
        {"a": {**entry, "shape": [-1, 2]}},
        {"a": {**entry, "data_offsets": [16, 0]}},
        {"a": {**entry, "data_offsets": [0, 2**60]}},
        {"a": {**entry, "dtype": "EVIL"}},
        {"a": entry, "b": entry},
        {"a": 5},
        [],
        {"__metadata__": {"format": 5}, "a": entry},
        {"__metadata__": {"format": "pt"}, "\x1b[31m": entry},
        {"a": {**entry, "shape": []}},
        {"a": {**entry, "shape": [0] * 1000}},
    )
    header = json.dumps(rng.choice(headers)).encode()
    length = rng.choice((len(header), len(header), len(header), 2**60, 0, len(header) + 5))
    content = struct.pack("<Q", length) + header + bytes(16)
    (folder / "model.safetensors").write_bytes(content)


def odd_numbers(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoiler:
    def spoil(folder: Path, rng: random.Random) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        some = rng.random() < 0.5
        keys = rng.sample(sorted(weights), 2) if some else list(weights)
        weights |= {key: change(weights[key]).clone() for key in keys}
        save_file(weights, fresh(path), metadata={"format": "pt"})

    return spoil


def odd_names(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    key = rng.choice(sorted(weights))
    odd = rng.choice(("\x1b[31mred", "", "a" * 10**4, "__class__", "..", key + ".weight", "\u202e"))
    weights[odd] = weights.pop(key)
    save_file(weights, fresh(path), metadata={"format": "pt"})


def missing_weights(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    kept = rng.sample(sorted(weights), rng.choice((0, 1, len(weights) - 1)))
    save_file({key: weights[key] for key in kept}, fresh(path), metadata={"format": "pt"})


# --- tokenizers


def an_odd_tokenizer_entry(folder: Path, rng: random.Random) -> None:
    entries = {
        "tokenizer_class": (
            5,
            [],
            "os.system",
            "BertTokenizer",
            "LlamaTokenizer",
            "",
            "evil.Words",
        ),
        "added_tokens_decoder": (
            {"x": 5},
            {"-1": {"content": "a"}},
            {"99999999999": {"content": "a"}},
            {"0": None},
            [1],
        ),
        "model_max_length": (-5, "x", 10**400, None),
        "unk_token": (5, [], {"content": 5}, "\x1b[31m", None),
        "chat_template": (
            "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
            5,
            [{"name": 1}],
        ),
        "tokenizer_file": ("/etc/passwd", 5),
        "vocab_file": ("/etc/passwd", "/dev/zero", 5),
        "extra_special_tokens": ([1], {"a": 5}, 5, ["x"]),
        "backend": ("evil", 5),
        "name_or_path": ("owner/repo", 5),
        "clean_up_tokenization_spaces": ("x", []),
        "padding_side": ("up", 5),
        "init_inputs": ([5], "x"),
    }
    key = rng.choice(sorted(entries))
    edit(folder / "tokenizer_config.json", **{key: rng.choice(entries[key])})


def an_odd_tokenizer(folder: Path, rng: random.Random) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    changes: tuple[dict[str, Any], ...] = (
        {"model": {"type": "evil"}},
        {"model": None},
        {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 2**32}, "unk_token": "a"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 10**9}, "unk_token": "a"}},
        {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "missing"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "missing"]]}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": 7}},
        {"model": {"type": "Unigram", "vocab": [["a", "x"]]}},
        {"added_tokens": [{"id": -1, "content": "x"}]},
        {"added_tokens": [{"id": 2**31, "content": "", "special": True}]},
        {"added_tokens": 5},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{}] * 3}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b" * 1000}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"A": 1}]}},
        {"decoder": {"type": "evil"}},
        {"version": "9.9"},
        {"truncation": {"max_length": -1}},
        {"padding": {"strategy": {"Fixed": 10**12}}},
    )
    path.write_text(json.dumps({**content, **rng.choice(changes)}))


def an_odd_list_of_tokens(folder: Path, rng: random.Random) -> None:
    name = rng.choice(("special_tokens_map.json", "added_tokens.json", "vocab.json"))
    odd: tuple[Any, ...] = ([1, 2], {"x": 5}, {"unk_token": [[]]}, {"a": 10**30}, 5, {"": None})
    fresh(folder / name).write_text(json.dumps(rng.choice(odd)))
    if rng.random() < 0.5:
        fresh(folder / "tokenizer.json")


def a_foreign_vocabulary(folder: Path, rng: random.Random) -> None:
    fresh(folder / "tokenizer.json")
    name = rng.choice(("vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "vocab.json"))
    (folder / name).write_bytes(rng.choice((b"", b"\xff" * 50, b"a\nb\nc\n", rng.randbytes(500))))


# --- whole folders


def an_adapter(folder: Path, rng: random.Random) -> None:
    fresh(folder / "config.json")
    edit(folder / "adapter_config.json", base_model_name_or_path="owner/repo", peft_type="LORA")


def a_parent_of_checkpoints(folder: Path, rng: random.Random) -> None:
    inner = folder / f"checkpoint-{rng.randrange(1000)}"
    inner.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(inner / name)


def an_empty_folder(folder: Path, rng: random.Random) -> None:
    for path in list(folder.iterdir()):
        path.unlink()


def a_tokenizer_alone(folder: Path, rng: random.Random) -> None:
    fresh(folder / "config.json")
    fresh(folder / "model.safetensors")


def many_files(folder: Path, rng: random.Random) -> None:
    for i in range(2000):
        (folder / f"vocab{i}.model").touch()


SPOILERS: dict[str, Spoiler] = {
    **{
        f"link to {target}": a_link(target)
        for target in ("/dev/zero", "/dev/urandom", "/etc/passwd", "missing", "itself", "folder")
    },
    "link outside": a_link("outside"),
    "nested 100,000 lists": nested(100_000, "[", "]"),
    "nested 100,000 objects": nested(100_000, '{"a":', "}"),
    "nested 700 objects": nested(700, '{"a":', "}"),
    "weights all zero": odd_numbers(torch.zeros_like),
    "weights NaN": odd_numbers(lambda x: x.double().fill_(torch.nan).to(x.dtype)),
    "weights infinite": odd_numbers(lambda x: x.double().fill_(torch.inf).to(x.dtype)),
    "weights huge": odd_numbers(lambda x: x * 1e30),
    "weights int8": odd_numbers(lambda x: x.to(torch.int8)),
    "weights bool": odd_numbers(lambda x: x > 0),
    "weights int64": odd_numbers(lambda x: x.long()),
    "weights float8": odd_numbers(lambda x: x.to(torch.float8_e4m3fn)),
    "weights half": odd_numbers(lambda x: x.half()),
    "weights scalar": odd_numbers(lambda x: x.flatten()[0]),
    "weights empty": odd_numbers(lambda x: x[:0]),
    "weights transposed": odd_numbers(lambda x: x.T.contiguous() if x.ndim == 2 else x),
    **{
        spoil.__name__.replace("_", " "): spoil
        for spoil in (
            a_chain_of_links,
            a_fifo,
            a_socket,
            a_folder,
            a_sparse_file,
            an_empty_file,
            noise,
            nested_in_config,
            not_json,
            a_cut_file,
            a_flipped_byte,
            an_odd_entry,
            a_huge_size,
            a_size_of_nothing,
            an_odd_type,
            another_type,
            an_odd_option,
            code_by_name,
            a_pickle_for_safetensors,
            only_pickles,
            an_odd_index,
            an_odd_header,
            odd_names,
            missing_weights,
            an_odd_tokenizer_entry,
            an_odd_tokenizer,
            an_odd_list_of_tokens,
            a_foreign_vocabulary,
            an_adapter,
            a_parent_of_checkpoints,
            an_empty_folder,
            a_tokenizer_alone,
            many_files,
        )
    },
}
