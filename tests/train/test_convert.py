"""Conversion of transformers models: they run, train, mask and measure as before, or not at all."""

import copy

import pytest
import torch
import transformers

import lipscope as ls
from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.nn.contractive import ATTENTIONS
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.train.convert import convert_model
from lipscope.train.monitor import SmoothnessMonitor
from tests.models import zoo
from tests.train.watched import unchecked

IDS = zoo.sample("gpt2")["input_ids"]

ROTARY, CAUSAL = {"llama", "gpt_neox", "cohere"}, {"llama", "gpt_neox", "gpt2", "opt", "cohere"}
CONVERTED = [
    ("bert", "l2"),
    ("bert", "contractive-ball"),
    ("roberta", "dot"),
    ("gpt2", "contractive"),
    ("gpt2", "ball"),
    ("llama", "cosine"),
    ("llama", "l2"),
    ("distilbert", "contractive"),
    ("opt", "l2"),
    ("gpt_neox", "dot"),
    ("vit", "l2"),
    ("cohere", "cosine"),
]
REFUSED = {
    "albert": r"layer 0 \(AlbertAttention\) cannot be converted: it serves several layers; ",
    "qwen3": r"layer 0 \(Qwen3Attention\) cannot .*: it is not plain self-attention; supported",
    "olmo2": r"layer 0 \(Olmo2Attention\) cannot be converted: it is not plain self-attention",
    "t5": r"layer 0 \(T5Attention\) cannot be converted: it is not plain self-attention",
    "mistral": "it has a sliding window, which the new layer does not support",
    "gemma2": "it has a sliding window, which the new layer does not support",
    "gpt_oss": "it has a sliding window, which the new layer does not support",
    "glm": "2 heads of size 8 do not add up to the dimension 8 of a token",
    "diffllama": r"layer 0 \(DiffLlamaAttention\) cannot be .*a map of a single sequence",
    "mobilebert": r"layer 0 \(MobileBertSelfAttention\) cannot be .*a map of a single sequence",
    "gpt_neo": "GPTNeoModel uses its own attention code, .*, so it cannot be converted",
    "falcon": "FalconModel uses its own attention code, .*, so it cannot be converted",
    "doge": "DogeModel .*adds a bias to its scores that depends on the input.*cannot be converted",
}


def core(model, name, layer):
    """The attention module of a layer, or what stands in its place."""
    return model.get_submodule(zoo.FAMILIES[name].parts["core"].format(layer))


def dense_norm(f, X):
    J = torch.autograd.functional.jacobian(f, X.double())
    return torch.linalg.matrix_norm(J.reshape(-1, X.numel()), 2).item()


def sample(name):
    return {key: x.float() if x.is_floating_point() else x for key, x in zoo.sample(name).items()}


def test_every_family_is_converted_or_refused():
    families = {**zoo.FAMILIES, **zoo.BYPASSING, **zoo.ENTANGLED, **zoo.MASKING}
    assert {name for name, _ in CONVERTED} | set(REFUSED) == set(families)


@pytest.mark.parametrize(("name", "to"), CONVERTED)
def test_families_are_converted_and_measured(name, to):
    model, inputs = zoo.make(name), sample(name)
    first = {key: x[:1] for key, x in inputs.items()}
    sites = ls.load(copy.deepcopy(model)).sites(**first, scopes=["attention"])
    report = convert_model(model, to, inputs)
    seen = {}
    for i in range(2):
        layer = core(model, name, i).layer
        assert type(layer) is type(ATTENTIONS[to](8, 2, False)) and layer.causal == (name in CAUSAL)
        layer.register_forward_pre_hook(lambda m, args, i=i: seen.update({i: args[0][0].detach()}))
    y = model(**inputs).last_hidden_state
    assert y.shape[:2] == (2, 5) and y.isfinite().all()
    for i, (row, site) in enumerate(zip(report.layers, sites, strict=True)):
        assert row.before.value == pytest.approx(
            ls.local_lipschitz(site.f, site.X).value.item(), rel=1e-9
        )
        exact = copy.deepcopy(core(model, name, i).layer).double()
        assert row.after.value == pytest.approx(dense_norm(exact, seen[i]), rel=1e-5)
        assert ("rotary positions" in row.left) == (name in ROTARY)
    assert not model.training


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_to_dot_without_query_bias_is_the_same_model(name):
    model, inputs = zoo.make(name), zoo.sample(name)
    with torch.no_grad():
        for i in range(2):
            old = core(model, name, i)
            (old.query.bias if name == "bert" else old.c_attn.bias)[:8] = 0
    expected = model(**inputs).last_hidden_state
    convert_model(model, "dot", inputs["input_ids"])
    assert torch.allclose(model(**inputs).last_hidden_state, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "side", "implementation"),
    [
        ("bert", "right", "eager"),
        ("bert", "left", "sdpa"),
        ("gpt2", "left", "eager"),
        ("gpt2", "right", "sdpa"),
    ],
)
def test_padding_is_respected(name, side, implementation):
    model, ids = zoo.make(name), zoo.sample(name, batch=3, n=6)["input_ids"]
    model.set_attn_implementation(implementation)
    convert_model(model, "l2" if implementation == "sdpa" else "contractive", ids)
    mask = torch.ones_like(ids)
    mask[1, slice(4, 6) if side == "right" else slice(0, 2)] = 0
    real = mask[1].bool()
    positions = torch.arange(6).expand(3, -1).clone()
    positions[1, real] = torch.arange(4)
    y = model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    alone = model(input_ids=ids[1:2, real]).last_hidden_state
    assert torch.allclose(y[1, real], alone[0], atol=1e-5)
    assert torch.allclose(y[0], model(input_ids=ids[:1]).last_hidden_state[0], atol=1e-5)


def test_masks_that_hide_more_are_refused():
    model, ids = zoo.make("bert"), zoo.sample("bert")["input_ids"]
    convert_model(model, "l2", ids)
    packed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    packed[:, :, 3:, :3] = False
    with pytest.raises(ls.UserError, match="attention_mask hides more than padding"):
        model(input_ids=ids, attention_mask=packed)
    attention = model.encoder.layer[0].attention.self
    with pytest.raises(ls.UserError, match="was called with head_mask"):
        attention(torch.zeros(1, 5, 8), head_mask=torch.ones(2))
    with pytest.raises(ls.UserError, match="cannot read encoder_hidden_states"):
        attention(torch.zeros(1, 5, 8), encoder_hidden_states=torch.zeros(1, 5, 8))


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_converted_model_trains_and_keeps_its_state(kind):
    name = {"B": "bert", "G": "gpt2", "L": "llama"}[kind[0]]
    family = zoo.FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.options)
    model = getattr(transformers, kind)(config).train()
    ids = zoo.sample(name)["input_ids"]
    convert_model(
        model,
        "contractive",
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        constant=0.5,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    twin = getattr(transformers, kind)(config)
    convert_model(twin, "contractive", ids, constant=0.5)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    if kind != "BertForMaskedLM":
        words = model.generate(ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
        step = model(input_ids=words[:, :-1]).logits[0, -1].argmax()
        assert words.shape == (1, 8) and words[0, -1] == step
        with pytest.raises(ls.UserError, match="has no cache"):
            model(input_ids=ids, use_cache=True)


def test_the_monitor_watches_a_converted_model_and_it_converts_again():
    model, inputs = zoo.make("gpt2"), zoo.sample("gpt2")
    report = convert_model(model, "l2", inputs)
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    model(**inputs)
    readings = monitor.step()
    assert [r.layer for r in readings] == ["h.0.attn.layer", "h.1.attn.layer"]
    assert [r.sigma for r in readings] == pytest.approx(
        [row.after.value for row in report.layers], rel=1e-4
    )
    monitor.close()
    with pytest.raises(ls.UserError, match=r"already contains lipscope's attention \(h.0.attn"):
        convert_model(model, "cosine", inputs)


def test_what_is_left_behind_is_named():
    expected = {
        "dot": {"query bias"},
        "l2": {"key weights"},
        "ball": {"key weights", "query bias", "lengths of queries"},
        "cosine": {"query bias", "key bias"},
    }
    for to, words in expected.items():
        report = convert_model(zoo.make("bert"), to, sample("bert"))
        assert {word for row in report.layers for word in row.left} == words


def test_l2_keeps_the_queries_and_the_values_that_queries_can_make():
    model = zoo.make("bert")
    old = copy.deepcopy(core(model, "bert", 0))
    output = copy.deepcopy(model.encoder.layer[0].attention.output.dense)
    convert_model(model, "l2", sample("bert"))
    new = core(model, "bert", 0)
    f = new.layer.as_map(5)
    Q, V = (m.weight.detach().double().unflatten(0, (2, -1)) for m in (old.query, old.value))
    for h in range(2):
        onto_queries = Q[h].T @ torch.linalg.solve(Q[h] @ Q[h].T, Q[h])
        own = slice(h * 4, (h + 1) * 4)
        assert torch.allclose(f.Q[own].double(), Q[h])
        assert torch.allclose(f.V[own].double(), V[h] @ onto_queries, atol=1e-5)
    assert torch.equal(f.O, output.weight)
    expected = output.bias + output.weight @ old.value.bias
    assert torch.allclose(new.bias, expected, atol=1e-6)


def test_carrying_over_draws_no_random_numbers_and_fresh_ones_do():
    model = zoo.make("bert")
    state = torch.random.get_rng_state()
    convert_model(model, "l2", sample("bert"))
    assert torch.equal(torch.random.get_rng_state(), state)
    fresh = zoo.make("bert")
    torch.manual_seed(7)
    convert_model(fresh, "l2", sample("bert"), fresh=True)
    torch.manual_seed(7)
    own = core(fresh, "bert", 0)
    assert torch.equal(L2SelfAttention(8, 2).query.weight, own.layer.query.weight)
    assert own.bias is None


def test_modes_and_hooks_are_left_as_they_were():
    model = zoo.make("gpt2").train()
    model.h[1].eval()
    convert_model(model, "l2", sample("gpt2"))
    for block, flag in zip(model.h, (True, False), strict=True):
        assert block.training == block.attn.layer.training == flag
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("l3", {}, "no attention 'l3' to convert to; choose one of dot, l2"),
        ("l2", {"constant": 0.5}, "is for contractive and contractive-ball attention"),
        ("contractive", {"constant": 0.0}, "constant must be a positive number"),
        (None, {}, "there is no attention None to convert to"),
        (["l2"], {}, r"there is no attention \['l2'\] to convert to"),
    ],
)
def test_a_wrong_target_is_refused(to, options, message):
    with unchecked(), pytest.raises(ls.UserError, match=message):
        convert_model(zoo.make("gpt2"), to, sample("gpt2"), **options)


def test_progress_is_called_before_every_measurement():
    seen = []
    convert_model(zoo.make("gpt2"), "l2", sample("gpt2"), progress=lambda *part: seen.append(part))
    assert seen == [(0, 2), (0.5, 2), (1, 2), (1.5, 2)]


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_cannot_be_converted_is_named_and_left_alone(name, message):
    model = zoo.make(name)
    kinds = {path: type(m) for path, m in model.named_modules()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ls.UserError, match=message):
        convert_model(model, "l2", zoo.sample(name))
    assert {path: type(m) for path, m in model.named_modules()} == kinds
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "rule"), [("gemma2", "a soft cap"), ("gpt_oss", "attention sinks")]
)
def test_a_layer_without_a_window_is_refused_for_what_else_it_has(name, rule):
    with pytest.raises(ls.UserError, match=f"layer 1 .* cannot be converted: it has {rule}"):
        convert_model(zoo.make(name), "l2", zoo.sample(name), layers=[1])


def test_a_failure_in_the_converted_model_undoes_everything(monkeypatch):
    model, inputs = zoo.make("gpt2"), zoo.sample("gpt2")
    attention = [block.attn for block in model.h]
    cache = model.config.use_cache
    monkeypatch.setattr(DotSelfAttention, "project", lambda self, X: 1 / 0)
    with pytest.raises(ls.UserError, match="does not run with its attention replaced"):
        convert_model(model, "dot", inputs)
    assert [block.attn for block in model.h] == attention and model.config.use_cache == cache


@pytest.mark.parametrize(
    "inputs", [torch.tensor([[3]]), {"input_ids": [[3, 4]], "attention_mask": [[0, 1]]}]
)
def test_a_sample_of_one_token_is_refused_as_it_does_not_show_the_causal_mask(inputs):
    model = zoo.make("gpt2")
    with pytest.raises(ls.UserError, match="the first sample has 1 token"):
        convert_model(model, "l2", inputs)
    assert type(model.h[0].attn).__name__ == "GPT2Attention"
    convert_model(model, "l2", torch.tensor([[3, 4]]))
    ids = zoo.sample("gpt2", n=6)["input_ids"]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7
    y, z = (model(input_ids=x).last_hidden_state for x in (ids, changed))
    assert torch.allclose(y[:, :-1], z[:, :-1], atol=1e-5) and not torch.allclose(y, z, atol=0.1)
    assert torch.allclose(model(input_ids=ids[:, :1]).last_hidden_state, y[:, :1], atol=1e-5)


def test_a_model_that_is_none_of_transformers_is_refused():
    for model, name in ((None, "NoneType"), (DotSelfAttention(8, 2), "DotSelfAttention")):
        with (
            unchecked(),
            pytest.raises(ls.UserError, match=f"takes a transformers model, got {name}"),
        ):
            convert_model(model, "l2", IDS)


@pytest.mark.parametrize(
    ("inputs", "layers", "message"),
    [
        (None, None, "the model was called with no tokens"),
        ("hello", None, "inputs must be token ids .*encode a text with"),
        (["a", "text"], None, "inputs must be token ids .*encode a text with"),
        ([[1, 2, 3], [4, 5]], None, "inputs must be token ids"),
        ((IDS, IDS), None, "inputs must be token ids .* or a dictionary"),
        (IDS, [], "layers is empty"),
        (IDS, "0", "layers must be a list of layers"),
        (IDS, 1, r"as in layers=\[1\], got int"),
        (IDS, [0, 0], "layer 0 is listed 2 times"),
        (IDS, ["0"], "layer '0' does not exist: the model has layers 0 to 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(inputs, layers, message):
    model = zoo.make("gpt2")
    with unchecked(), pytest.raises(ls.UserError, match=message):
        convert_model(model, "l2", inputs, layers=layers)
    assert {type(block.attn).__name__ for block in model.h} == {"GPT2Attention"}


@pytest.mark.parametrize(
    "inputs", [[1, 2, 3], [[1, 2, 3], [4, 5, 6]], (torch.tensor([[1, 2, 3]]),)]
)
def test_ids_may_be_lists_or_the_only_argument(inputs):
    expected = convert_model(zoo.make("gpt2"), "l2", torch.tensor([[1, 2, 3]]))
    found = convert_model(zoo.make("gpt2"), "l2", inputs)
    values = [row.after.value for row in expected.layers]
    assert [row.after.value for row in found.layers] == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "path"), [("gpt2", "h.0.attn"), ("bert", "encoder.layer.0.attention")]
)
def test_a_frozen_model_stays_frozen(name, path):
    model = zoo.make(name).requires_grad_(False)
    model.get_submodule(path.replace("0", "1")).requires_grad_(True)
    convert_model(model, "l2", zoo.sample(name))
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trained and all(key.startswith(path.replace("0", "1")) for key in trained)
    assert any(key.endswith("layer.query.weight") for key in trained)


def test_arguments_by_position_mean_what_they_meant_to_the_old_attention():
    X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[1, 1, 1, 0, 0]])
    gpt2, bert = zoo.make("gpt2"), zoo.make("bert")
    convert_model(gpt2, "l2", IDS)
    convert_model(bert, "l2", IDS)
    causal, full = gpt2.h[0].attn, bert.encoder.layer[0].attention.self
    with pytest.raises(ls.UserError, match="has no cache"):
        causal(X, object())
    for module, args in ((causal, (None, padding)), (full, (padding,))):
        expected = module(X[:, :3])[0]
        assert torch.allclose(module(X, *args)[0][:, :3], expected, atol=1e-6)
        assert torch.allclose(
            module(hidden_states=X, attention_mask=padding)[0][:, :3], expected, atol=1e-6
        )
    assert not torch.allclose(full(X)[0][:, :3], full(X[:, :3])[0], atol=1e-3)


def test_weights_created_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = zoo.make("bert")
    with pytest.raises(ls.UserError, match="cannot be trained; build the model outside of it"):
        convert_model(model, "l2", zoo.sample("bert")["input_ids"])
