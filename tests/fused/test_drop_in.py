"""torch's attention replaced: its conventions, its errors, and the derivatives it does not have."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from itertools import product
from threading import Thread

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs_own
from torch.testing._internal.two_tensor import TwoTensor

import lipscope as ls
from lipscope.fused import drop_in
from lipscope.fused._torch_internals import has_memory

mine = ls.scaled_dot_product_attention
unchecked = inspect.unwrap(mine)
"""As users have it: in tests the types of arguments are checked before lipscope sees them."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def point(lead=(2, 4), keys=7):
    return draw(*lead, 5, 8), draw(*lead, keys, 8, seed=1), draw(*lead, keys, 6, seed=2)


CASES = {
    "plain": {},
    "causal with more keys than queries": {"is_causal": True},
    "boolean mask": {"attn_mask": draw(5, 7, seed=3) < 1},
    "mask of keys": {"attn_mask": torch.tensor([True, False, True, True, True, False, True])},
    "additive mask by member": {"attn_mask": draw(2, 1, 5, 7, seed=4)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values_and_gradients_are_torchs(options):
    inputs = [x.requires_grad_() for x in point()]
    expected_options = dict(options)
    mask = options.get("attn_mask")
    if mask is not None and mask.ndim == 1:
        expected_options["attn_mask"] = mask.expand(5, 7)
    results = []
    for attention, given in ((mine, options), (torchs_own, expected_options)):
        out = attention(*inputs, **given)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("q", "k", "options"),
    [
        ((5, 8), (7, 8), {}),
        ((4, 5, 8), (4, 7, 8), {}),
        ((2, 4, 5, 8), (1, 4, 7, 8), {}),
        ((2, 4, 5, 8), (2, 1, 7, 8), {}),
        ((2, 1, 5, 8), (2, 4, 7, 8), {}),
        ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), {"is_causal": True}),
    ],
)
def test_shapes_broadcast_as_in_torch(q, k, options):
    query, key, value = draw(*q), draw(*k, seed=1), draw(*k, seed=2)
    out = mine(query, key, value, **options)
    torch.testing.assert_close(out, torchs_own(query, key, value, **options))


def test_what_cannot_be_differentiated_is_refused():
    q, k, v = point()
    with pytest.raises(ls.UserError, match="dropout_p must be 0"):
        mine(q, k, v, dropout_p=0.1)
    with pytest.raises(ls.UserError, match="exclude each other"):
        mine(q, k, v, attn_mask=torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    with pytest.raises(ls.UserError, match="enable_gqa=True"):
        mine(q, k[:, :2], v[:, :2])
    with pytest.raises(ls.UserError, match="mask requires grad"):
        mine(q, k, v, attn_mask=torch.zeros(5, 7, requires_grad=True))
    with forward_ad.dual_level(), pytest.raises(ls.UserError, match="carry a tangent"):
        mask = forward_ad.make_dual(draw(5, 7), draw(5, 7))
        mine(forward_ad.make_dual(q, q), k, v, attn_mask=mask)


def by_name(x):
    return torchs_own(x, x, x)


def by_attribute(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("f", [by_name, by_attribute])
def test_everywhere_reaches_functions_however_they_were_imported(f):
    x, dx = draw(2, 5, 8), draw(2, 5, 8, seed=1)
    with ls.attend_everywhere():
        _, found = torch.func.jvp(f, (x,), (dx,))
    h = 1e-6
    torch.testing.assert_close(found, (f(x + h * dx) - f(x - h * dx)) / (2 * h), rtol=0, atol=1e-8)


def test_everywhere_reaches_torchs_modules_and_ends():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x, dx = draw(2, 5, 8), draw(2, 5, 8, seed=1)

    def f(x):
        return layer(x, x, x, need_weights=False)[0]

    with ls.attend_everywhere():
        _, found = torch.func.jvp(f, (x,), (dx,))
    h = 1e-6
    torch.testing.assert_close(found, (f(x + h * dx) - f(x - h * dx)) / (2 * h), rtol=0, atol=1e-8)
    assert torch.nn.functional.scaled_dot_product_attention is torchs_own
    with pytest.raises(ZeroDivisionError), ls.attend_everywhere():
        raise ZeroDivisionError
    assert torch.nn.functional.scaled_dot_product_attention is torchs_own


def test_everywhere_ends_with_the_last_of_several_threads():
    first, second = ls.attend_everywhere(), ls.attend_everywhere()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is mine
    second.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is torchs_own


def by_any_name(*args, **options):
    return torch.nn.functional.scaled_dot_product_attention(*args, **options)


ROUTES = {
    "called": (nullcontext, mine),
    "everywhere, by attribute": (ls.attend_everywhere, by_any_name),
    "everywhere, by name": (ls.attend_everywhere, torchs_own),
}


@pytest.fixture(params=ROUTES)
def routed(request):
    """A way to call lipscope's attention."""
    context, function = ROUTES[request.param]

    def call(*args, **options):
        with context():
            return function(*args, **options)

    return call


@pytest.fixture
def calls(monkeypatch):
    """One entry for each computation by lipscope."""
    seen, inner = [], drop_in.attend_by_rules

    def counted(*args):
        seen.append(args)
        return inner(*args)

    monkeypatch.setattr(drop_in, "attend_by_rules", counted)
    return seen


def truth(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torchs_own(*args, **options)


def value_gradient_tangent(function, inputs, mask):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs, attn_mask=mask)
    gradients = torch.autograd.grad(out.sin().sum(), inputs)
    still = [x.detach() for x in inputs]
    _, tangent = torch.func.jvp(
        lambda *x: function(*x, attn_mask=mask), tuple(still), tuple(x.cos() for x in still)
    )
    return out, *gradients, tangent


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("keys", [3, 5, 7])
@pytest.mark.parametrize("corner", ["upper left", "lower right"])
def test_causal_biases_of_torch(routed, calls, corner, keys):
    """A CausalBias is a tensor without content: reading it would be reading random memory."""
    make = causal_upper_left if corner == "upper left" else causal_lower_right
    diagonal = 0 if corner == "upper left" else keys - 5
    seen = torch.ones(5, keys, dtype=torch.bool).tril(diagonal)
    inputs = point(keys=keys)
    found = value_gradient_tangent(routed, inputs, make(5, keys))
    assert len(calls) == 2 and type(found[0]) is torch.Tensor
    for x, y in zip(found, value_gradient_tangent(truth, inputs, seen), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_causal_biases_that_do_not_fit(routed):
    q, k, v = point()
    with pytest.raises(RuntimeError, match="must broadcast"):
        routed(q, k, v, attn_mask=causal_lower_right(4, 7))
    with pytest.raises(ValueError, match="exclude each other"):
        routed(q, k, v, attn_mask=causal_upper_left(5, 7), is_causal=True)
    # As in torch: the sizes of an upper-left bias are not read, and a row broadcasts.
    for bias, options in (
        (causal_upper_left(2, 2), {"is_causal": True}),
        (causal_lower_right(1, 7), {}),
    ):
        torch.testing.assert_close(routed(q, k, v, attn_mask=bias), truth(q, k, v, **options))
    with pytest.raises(ls.UserError, match="CausalBias, which holds no numbers; pass causal=True"):
        ls.attend(q, q, q, mask=causal_upper_left(5, 5))


class Logging(torch.Tensor):
    """Hands every call on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Logging.log.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


OWN_ANSWER = torch.zeros(())


class KnowsTheAttribute(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            return OWN_ANSWER
        return super().__torch_function__(func, types, args, kwargs or {})


class KnowsTheName(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return {torchs_own: OWN_ANSWER}.get(func, NotImplemented)


class KnowsNothing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


class Subclass(torch.Tensor):
    """Without rules of its own."""


class Doubles(torch.Tensor):
    """Sees every operation, and is the only one to know what its numbers mean."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [x.as_subclass(torch.Tensor) if isinstance(x, Doubles) else x for x in args]
        return 2 * func(*args, **(kwargs or {}))


def arguments(where: int, kind) -> list[torch.Tensor]:
    """Queries, keys, values and a mask, one of them of this class."""
    given = [*point(), draw(5, 7, seed=5)]
    given[where] = kind(given[where])
    return given


def of_class(kind):
    return lambda x: x.as_subclass(kind)


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("kind", [KnowsTheAttribute, KnowsTheName])
def test_classes_are_asked_for_their_own_attention(routed, kind, where):
    assert routed(*arguments(where, of_class(kind))).shape == OWN_ANSWER.shape


@pytest.mark.parametrize("where", range(4))
def test_classes_that_hand_attention_on_get_lipscopes(routed, calls, where):
    expected = truth(*arguments(where, torch.clone))
    for kind in (Logging, Subclass):
        Logging.log = []
        given = [x.requires_grad_(where != 3) for x in arguments(where, of_class(kind))[:3]]
        out = routed(*given, arguments(where, of_class(kind))[3])
        assert type(out) is kind and len(calls) == 1
        calls.clear()
        torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)
        assert kind is Subclass or torchs_own in Logging.log
    parameter = arguments(where, lambda x: nn.Parameter(x, requires_grad=where != 3))
    assert type(routed(*parameter)) is torch.Tensor


def test_gradients_of_a_class_that_hands_on(routed):
    inputs, Logging.log = [x.requires_grad_() for x in point()], []
    out = routed(*(x.as_subclass(Logging) for x in inputs)).as_subclass(torch.Tensor)
    Logging.log.clear()
    found = torch.autograd.grad(out.sin().sum(), inputs)
    assert Logging.log == []  # the class is asked about attention, not about its formulas
    for x, y in zip(found, torch.autograd.grad(truth(*inputs).sin().sum(), inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


UNKNOWN = {
    "sees every operation": (of_class(Doubles), "Doubles, a tensor class with operations"),
    "without memory": (lambda x: TwoTensor(x, x), "TwoTensor, a tensor class with operations"),
    "sparse": (torch.Tensor.to_sparse, "sparse_coo tensor; pass a dense one"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "nested tensor; pass a dense"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize(("kind", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_other_classes_and_layouts_are_refused(routed, kind, message, where):
    given = arguments(where, kind)
    with pytest.raises(ls.UserError, match=message):
        routed(*given)
    with pytest.raises(ls.UserError, match=message):
        ls.attend(*given[:3], mask=given[3])


def test_classes_that_only_override_functions():
    q, k, v = point()
    with pytest.raises(ls.UserError, match="Logging, a tensor class with operations of its own"):
        ls.attend(q.as_subclass(Logging), k, v)
    with pytest.raises(TypeError, match="KnowsNothing define no attention") as refused:
        mine(q, k.as_subclass(KnowsNothing), v)
    assert isinstance(refused.value, ls.UserError)
    out = ls.attend(q.as_subclass(Subclass), k, v)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), torchs_own(q, k, v))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_answer_for_themselves(routed):
    parts = [draw(2, 3, 8).float(), draw(2, 5, 8, seed=1).float()]
    jagged = torch.nested.nested_tensor(
        [x.mT.mT.transpose(0, 1) for x in parts], layout=torch.jagged
    )
    x = jagged.transpose(1, 2)
    for out, part in zip(routed(x, x, x).unbind(), parts, strict=True):
        torch.testing.assert_close(out, truth(part, part, part))


def test_symbolic_tracing_records_torchs_function():
    class Attention(nn.Module):
        def forward(self, x):
            return unchecked(x, x, x)

    traced = torch.fx.symbolic_trace(Attention())
    assert torchs_own in {node.target for node in traced.graph.nodes}


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def outcome(function, *args, **options):
    """The dtype of the result, or the error."""
    try:
        return function(*args, **options).dtype
    except Exception as error:
        return error


def assert_same(found, expected):
    if isinstance(expected, Exception):
        assert isinstance(found, ls.UserError) and isinstance(found, RuntimeError), repr(found)
    else:
        assert found == expected


@pytest.mark.parametrize("target", [None, torch.bfloat16, torch.float16])
def test_mixed_dtypes_and_autocast_are_torchs(target):
    """Autocast casts what is floating point and not float64; then all must agree, as in torch."""
    x, mask = draw(1, 2, 3, 8), torch.ones(3, 3)
    context = nullcontext() if target is None else torch.autocast("cpu", target)
    with context:
        for q, k, v in product(FLOATS, repeat=3):
            given = (x.to(q), x.to(k), x.to(v))
            assert_same(outcome(mine, *given), outcome(torchs_own, *given))
        for q, m in product((*FLOATS, torch.int64), (*FLOATS, torch.bool, torch.int64)):
            given = (x.to(q), x.to(q), x.to(q), mask.to(m))
            assert_same(outcome(mine, *given), outcome(torchs_own, *given))
        assert mine(x, x, x).dtype == torch.float64  # a study in float64 keeps its digits
        torch.testing.assert_close(mine(x, x, x), truth(x, x, x), rtol=1e-13, atol=1e-13)


def test_autocast_rounds_the_mask_as_torch_does():
    x, mask = draw(1, 2, 3, 8).float(), 1e3 * draw(3, 3, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = mine(x, x, x, mask)
    rounded = [t.bfloat16().double() for t in (x, x, x, mask)]
    torch.testing.assert_close(found.double(), truth(*rounded), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", FLOATS)
def test_meta_and_fake_tensors_have_shapes_and_derivatives(routed, dtype):
    def shapes(device):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in point())
        mask = torch.ones(5, 7, dtype=torch.bool, device=device)
        out = routed(q, k, v, mask)
        _, tangent = torch.func.jvp(lambda x: routed(x, k, v, mask), (q,), (q,))
        return [(x.shape, x.dtype) for x in (out, tangent, *torch.autograd.grad(out.sum(), (q, k)))]

    assert shapes("meta") == shapes("cpu")
    with FakeTensorMode():
        assert shapes("cpu") == shapes("meta")


EMPTY = {
    "no queries": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 6)),
    "nothing": ((2, 4, 0, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6)),
    "no batch": ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 6)),
    "head size 0": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 6)),
    "value size 0": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 0)),
    "2 dimensions": ((0, 8), (7, 8), (7, 8)),
}


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("option", ["plain", "is_causal", "attn_mask", "bias"])
@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
def test_empty_inputs_give_what_torch_gives(routed, shapes, option):
    n, keys = shapes[0][-2], shapes[1][-2]
    options = {"is_causal": True} if option == "is_causal" else {}
    expected_options = dict(options)
    if option in ("attn_mask", "bias"):
        seen = torch.ones(n, keys, dtype=torch.bool).tril(keys - n)
        expected_options = {"attn_mask": seen}
        options = {"attn_mask": seen if option == "attn_mask" else causal_lower_right(n, keys)}
    results = []
    for function, given in ((routed, options), (torchs_own, expected_options)):
        inputs = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        out = function(*inputs, **given)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", ["no queries", "no keys", "no heads", "head size 0"])
def test_attend_names_what_is_empty(case):
    with pytest.raises(ls.UserError, match="is empty"):
        ls.attend(*(draw(*shape) for shape in EMPTY[case]))


x = draw(2, 4, 5, 8)
WRONG = {
    "dtypes": ((x, x.float(), x), {}),
    "devices": ((x, x.to("meta"), x), {}),
    "one dimension": ((x[0, 0, 0], x, x), {}),
    "head sizes": ((x, x[..., :7], x), {}),
    "lengths of key and value": ((x[0], x[0], x[0, :, :4]), {}),
    "leading dimensions": ((x, draw(3, 4, 5, 8), draw(3, 4, 5, 8)), {}),
    "heads": ((x, x[:, :2], x[:, :2]), {}),
    "groups of heads": ((x, x[:, :3], x[:, :3]), {"enable_gqa": True}),
    "groups of one head": ((x[:, :1], x, x), {"enable_gqa": True}),
    "integers": ((x.long(),) * 3, {}),
    "complex numbers": ((x.to(torch.complex128),) * 3, {}),
    "float8": ((x.to(torch.float8_e4m3fn),) * 3, {}),
    "integer mask": ((x, x, x, torch.ones(5, 5, dtype=torch.int64)), {}),
    "float64 mask": ((x.float(),) * 3, {"attn_mask": draw(5, 5)}),
    "rows of the mask": ((x, x, x, torch.ones(4, 5) > 0), {}),
    "heads of the mask": ((x, x, x, torch.ones(3, 5, 5) > 0), {}),
    "members of the mask": ((x[:1], x[:1], x[:1], torch.ones(2, 1, 5, 5) > 0), {}),
    "dimensions of the mask": ((x, x, x, torch.ones(1, 1, 1, 5, 5) > 0), {}),
}


@pytest.mark.parametrize(("args", "options"), WRONG.values(), ids=WRONG)
def test_errors_have_the_classes_that_torchs_have(routed, args, options):
    with pytest.raises(RuntimeError):
        truth(*args, **options)
    with pytest.raises(RuntimeError) as found:
        routed(*args, **options)
    assert isinstance(found.value, ls.UserError)


OF_WRONG_TYPE = {
    "list": ((x.tolist(), x, x), {}),
    "no value": ((x, x, None), {}),
    "list as mask": ((x, x, x, [True]), {}),
    "scale": ((x, x, x), {"scale": "1"}),
    "dropout": ((x, x, x), {"dropout_p": None}),
    "causal": ((x, x, x), {"is_causal": 1}),
    "grouped": ((x, x, x), {"enable_gqa": None}),
}


@pytest.mark.parametrize(("args", "options"), OF_WRONG_TYPE.values(), ids=OF_WRONG_TYPE)
def test_arguments_of_the_wrong_type_are_type_errors(args, options):
    for function, kind in ((torchs_own, Exception), (unchecked, ls.UserError)):
        with pytest.raises(TypeError) as found:
            function(*args, **options)
        assert isinstance(found.value, kind)


def test_masks_on_another_device_are_refused(routed):
    """torch's kernel for the CPU reads uninitialised memory here."""
    with pytest.raises(RuntimeError, match="mask is on meta and q on cpu"):
        routed(x, x, x, torch.ones(5, 5, dtype=torch.bool, device="meta"))


def test_key_and_value_may_have_groups_of_their_own():
    q, k, v = draw(2, 6, 5, 8), draw(2, 2, 7, 8, seed=1), draw(2, 3, 7, 8, seed=2)
    torch.testing.assert_close(mine(q, k, v, enable_gqa=True), truth(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, -1e9])
def test_rows_of_one_huge_number_attend_as_if_not_masked(huge):
    """The documented difference: a constant cancels, and torch rounds the scores away."""
    q, k, v = (t.float() for t in point())
    mask = torch.zeros(5, 7)
    mask[2] = huge
    found, torchs = mine(q, k, v, mask), torchs_own(q, k, v, mask)
    torch.testing.assert_close(found, mine(q, k, v))
    torch.testing.assert_close(torchs[..., 2, :], v.mean(-2), rtol=1e-4, atol=1e-4)
    for nothing in (mask.masked_fill(mask < 0, -torch.inf), mask == 0):
        assert (mine(q, k, v, nothing)[..., 2, :] == 0).all()
        assert (torchs_own(q, k, v, nothing)[..., 2, :] == 0).all()


def test_everywhere_reaches_the_fused_inference_path_in_its_thread(calls):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    tokens = draw(2, 5, 8).float()

    def infer():
        with torch.no_grad():
            layer(tokens)

    def in_a_thread(work):
        before = len(calls)
        thread = Thread(target=work)
        thread.start()
        thread.join()
        return len(calls) - before

    with ls.attend_everywhere():
        infer()
        assert len(calls) == 1
        assert in_a_thread(infer) == 0
        assert in_a_thread(lambda: by_attribute(tokens)) == 1
        assert in_a_thread(lambda: by_name(tokens)) == 0
    assert in_a_thread(lambda: by_attribute(tokens)) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_code_scripted_inside_the_context_is_torchs(calls):
    with ls.attend_everywhere():
        scripted = torch.jit.script(by_attribute)
        found = scripted(x)
    torch.testing.assert_close(found, torchs_own(x, x, x))
    assert calls == []


def test_kernels_are_not_given_memory_that_lacks_the_numbers():
    """A negated view, a zero tensor and a fake tensor hold other numbers than their memory."""
    q = draw(5, 8)
    assert has_memory(q) and has_memory(nn.Parameter(q)) and has_memory(q.mT)
    with FakeTensorMode():
        fake = torch.empty(5, 8)
    for other in (torch._neg_view(q), torch._efficientzerotensor(5, 8), fake):
        assert not has_memory(other)
    torch.vmap(lambda row: row if not has_memory(row) else pytest.fail("read inside vmap"))(q)
