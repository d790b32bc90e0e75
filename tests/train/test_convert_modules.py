"""Conversion of torch's and lipscope's attention: weights, masks, measurements, all or nothing."""

import copy
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.attention_layer import AttentionLayer, DotSelfAttention
from lipscope.nn.contractive import ATTENTIONS, ContractiveL2Attention
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.train.convert import convert_model

DIM, HEADS, TOKENS = 8, 2, 6


def encoder(layers=1):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, layers)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def tokens(samples=3):
    return torch.randn(samples, TOKENS, DIM, generator=torch.Generator().manual_seed(1))


def dense_norm(f, X):
    J = torch.autograd.functional.jacobian(f, X.double())
    return torch.linalg.matrix_norm(J.reshape(-1, X.numel()), 2).item()


def entering(model, path, run):
    """What the module at `path` reads, first sample, in evaluation mode."""
    seen = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda m, args: seen.append(args[0][0].detach())
    )
    was = model.training
    with torch.no_grad():
        run(model.eval())
    model.train(was)
    handle.remove()
    return seen[0]


def states(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("to", ATTENTIONS)
def test_every_layer_is_converted_and_measured_where_it_stands(to):
    model, X = encoder(2), tokens()
    before = copy.deepcopy(model)
    report = convert_model(model, to, X)
    assert report.model is model and [x.name for x in report.layers] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    for row in report.layers:
        path = row.name
        old = copy.deepcopy(before.get_submodule(path)).double().eval()
        x = entering(before, path, lambda m: m(X))
        truth = dense_norm(lambda z, old=old: old(z[None], z[None], z[None])[0][0], x)
        assert row.before.value == pytest.approx(truth, rel=1e-5)
        new = copy.deepcopy(model.get_submodule(f"{path}.layer")).double()
        x = entering(model, f"{path}.layer", lambda m: m(X))
        assert row.after.value == pytest.approx(dense_norm(new, x), rel=1e-5)
        assert row.after.value <= row.bound
        assert (
            type(new) is type(ATTENTIONS[to](DIM, HEADS, False)) and row.new == type(new).__name__
        )
        assert str(f"{row.before.value:.4g}") in str(report)


def test_to_dot_without_query_bias_is_the_same_function():
    model, X = encoder(), tokens()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_bias[:DIM] = 0
    model.eval()
    expected = model(X)
    report = convert_model(model, "dot", X)
    assert torch.allclose(model(X), expected, atol=1e-5)
    assert all(row.left == () for row in report.layers)
    assert [row.after.value for row in report.layers] == pytest.approx(
        [row.before.value for row in report.layers]
    )


def test_what_is_left_behind_is_named():
    expected = {
        "dot": {"query bias"},
        "l2": {"key weights"},
        "ball": {"key weights", "query bias", "lengths of queries"},
        "cosine": {"query bias", "key bias"},
    }
    for to, words in expected.items():
        assert {
            word for row in convert_model(encoder(), to, tokens()).layers for word in row.left
        } == words


def test_l2_keeps_the_queries_and_the_values_that_queries_can_make():
    model, X = encoder(), tokens()
    old = copy.deepcopy(model.layers[0].self_attn)
    convert_model(model, "l2", X)
    layer = model.layers[0].self_attn.layer
    f = layer.as_map(TOKENS)
    Q, _, V = (W.unflatten(0, (HEADS, -1)) for W in old.in_proj_weight.detach().double().chunk(3))
    for h in range(HEADS):
        Qh = Q[h]
        onto_queries = Qh.T @ torch.linalg.solve(Qh @ Qh.T, Qh)
        own = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
        assert torch.allclose(f.Q[own].double(), Qh)
        assert torch.allclose(f.V[own].double(), V[h] @ onto_queries, atol=1e-5)
    assert torch.equal(f.O, old.out_proj.weight)
    bv = old.in_proj_bias[2 * DIM :]
    assert torch.allclose(
        model.layers[0].self_attn.bias, old.out_proj.bias + old.out_proj.weight @ bv, atol=1e-6
    )


def test_causal_masks_become_causal_layers_and_other_masks_are_refused():
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    model, X = encoder(), tokens()
    convert_model(model, "l2", (X, mask))
    assert all(layer.self_attn.layer.causal for layer in model.layers)
    y = model(X, mask)
    changed = X.clone()
    changed[:, -1] += 1
    model.eval()
    assert torch.allclose(model(X, mask)[:, :-1], model(changed, mask)[:, :-1], atol=1e-6)
    assert y.isfinite().all()
    with pytest.raises(ls.UserError, match="converted with a causal attn_mask"):
        model(X)
    other = torch.zeros(TOKENS, TOKENS)
    other[0, 1] = -math.inf
    fresh = encoder()
    before = states(fresh)
    with pytest.raises(ls.UserError, match=r"layers.0.self_attn .*neither causal nor empty"):
        convert_model(fresh, "l2", (X, other))
    assert all(torch.equal(before[name], tensor) for name, tensor in states(fresh).items())
    full = encoder()
    convert_model(full, "l2", X)
    with pytest.raises(ls.UserError, match="converted with no attn_mask"):
        full(X, mask)


@pytest.mark.parametrize(("to", "training"), [("l2", True), ("contractive", False)])
def test_padding_is_respected(to, training):
    model, X = encoder().train(training), tokens(4)
    for layer in model.layers:
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0
    padding = torch.zeros(4, TOKENS, dtype=torch.bool)
    padding[0, 4:] = padding[2, 2:] = True
    report = convert_model(model, to, {"src": X, "src_key_padding_mask": padding})
    assert report.tokens == 4
    y = model(X, src_key_padding_mask=padding)
    for sample, n in enumerate((4, 6, 2, 6)):
        assert torch.allclose(y[sample, :n], model(X[sample : sample + 1, :n])[0], atol=1e-5)
    y.sum().backward()
    x = entering(model, "layers.0.self_attn.layer", lambda m: m(X[:1, :4]))
    new = copy.deepcopy(model.layers[0].self_attn.layer).double()
    assert report.layers[0].after.value == pytest.approx(dense_norm(new, x), rel=1e-5)


def test_a_converted_encoder_trains_saves_and_loads():
    model, X = encoder(), tokens()
    convert_model(model, "contractive", X, constant=0.5)
    assert all(m.constant == 0.5 for m in model.modules() if isinstance(m, ContractiveL2Attention))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (model(X) - X.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in model.parameters())
    twin = encoder()
    convert_model(twin, "contractive", X, constant=0.5)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(X), model.eval()(X))


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("dot", "dot"),
        ("l2", "l2"),
        ("dot", "l2"),
        ("l2", "cosine"),
        ("contractive", "dot"),
        ("cosine", "contractive"),
        ("ball", "l2"),
        ("dot", "contractive-ball"),
        ("contractive-ball", "ball"),
    ],
)
def test_lipscope_layers_convert_into_each_other(source, to):
    torch.manual_seed(3)
    model = nn.Sequential(ATTENTIONS[source](DIM, HEADS, True), nn.LayerNorm(DIM))
    X, old = tokens(), copy.deepcopy(model[0]).double()
    report = convert_model(model, to, X)
    assert isinstance(model[0], AttentionLayer) and model[0].causal
    assert report.layers[0].before.value == pytest.approx(dense_norm(old, X[0]), rel=1e-5)
    assert report.layers[0].after.value == pytest.approx(
        dense_norm(copy.deepcopy(model[0]).double(), X[0]), rel=1e-5
    )
    if source == to == "dot" or source == to == "l2":
        assert torch.allclose(model[0](X), old(X.double()).float(), atol=1e-5)


def test_the_temperature_goes_into_the_queries():
    torch.manual_seed(4)
    model = nn.Sequential(DotSelfAttention(DIM, HEADS, temperature=0.5))
    expected = model(tokens())
    convert_model(model, "dot", tokens())
    assert torch.allclose(model(tokens()), expected, atol=1e-6)


def test_carrying_over_draws_no_random_numbers_and_fresh_ones_do():
    state = torch.random.get_rng_state()
    model = encoder()
    torch.random.set_rng_state(state)
    convert_model(model, "l2", tokens())
    assert torch.equal(torch.random.get_rng_state(), state)
    fresh = encoder()
    torch.manual_seed(7)
    convert_model(fresh, "l2", tokens(), fresh=True)
    torch.manual_seed(7)
    expected, own = L2SelfAttention(DIM, HEADS), fresh.layers[0].self_attn
    assert torch.equal(expected.query.weight, own.layer.query.weight)
    assert own.bias is None


def test_chosen_layers_only_and_shared_ones_everywhere():
    model = encoder(2)
    convert_model(model, "l2", tokens(), layers=["layers.1.self_attn"])
    assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention)
    assert isinstance(model.layers[1].self_attn.layer, L2SelfAttention)
    shared = DotSelfAttention(DIM, HEADS)
    twice = nn.Sequential(shared, nn.LayerNorm(DIM), shared)
    convert_model(twice, "l2", tokens())
    assert isinstance(twice[0], L2SelfAttention) and twice[0] is twice[2]


def test_modes_and_hooks_are_left_as_they_were():
    model = encoder(2).train()
    model.layers[1].eval()
    convert_model(model, "l2", tokens())
    assert model.layers[0].training and not model.layers[1].training
    assert model.layers[0].self_attn.layer.training and not model.layers[1].self_attn.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.idle = DotSelfAttention(DIM, HEADS)

    def forward(self, X):
        return self.own(X, X, X)[0] + self.cross(X, 2 * X, 2 * X)[0]


def test_what_cannot_be_converted_is_named_and_nothing_is_changed():
    model, X = Decoder(), tokens()
    before = {name: type(m) for name, m in model.named_modules()}
    weights = states(model)
    for arguments, message in [
        (
            ("l2", X),
            r"cross \(MultiheadAttention\) cannot be converted: .*a key or value other than",
        ),
        (("l3", X), "no attention 'l3' to convert to; choose one of dot, l2"),
        (("l2", X, {"constant": 0.5}), "is for contractive and contractive-ball attention"),
        (
            ("contractive", X, {"constant": 0.0, "layers": ["own"]}),
            "constant must be a positive number",
        ),
        (("l2", X, {"layers": ["own", "idle"]}), "idle .*did not run"),
        (
            ("l2", X, {"layers": ["own.out_proj"]}),
            "out_proj is a NonDynamicallyQuantizableLinear, which cannot",
        ),
        (("l2", X, {"layers": ["nowhere"]}), "no layer 'nowhere'"),
    ]:
        with pytest.raises(ls.UserError, match=message):
            convert_model(model, *arguments[:2], **(arguments[2] if len(arguments) > 2 else {}))
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in states(model).items())
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(
        ls.UserError, match=r"Linear has no attention that can be converted; supported are nn.Multi"
    ):
        convert_model(nn.Linear(2, 2), "l2", torch.ones(1, 2))
    with pytest.raises(ls.UserError, match="the model itself is a DotSelfAttention"):
        convert_model(DotSelfAttention(DIM, HEADS), "l2", X)


def test_a_model_that_fails_afterwards_is_put_back():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = DotSelfAttention(DIM, HEADS), DotSelfAttention(DIM, HEADS)

        def forward(self, X):
            return self.b(self.a(X)) @ self.b.key.weight

    model = Picky()
    a, b = model.a, model.b
    with pytest.raises(AttributeError):
        convert_model(model, "l2", tokens())
    assert model.a is a and model.b is b


def test_progress_is_called_before_every_measurement():
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(3)]
    )
    seen = []
    convert_model(
        model.eval(), "l2", torch.randn(1, 4, 8), progress=lambda *part: seen.append(part)
    )
    assert seen == [(i / 3, 2) for i in range(3)] + [(1 + i / 3, 2) for i in range(3)]
