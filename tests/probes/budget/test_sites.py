"""Products at sites against derivatives taken by finite differences of real runs."""

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope._types import UserError
from lipscope.probes.budget.formats import read_format, read_formats, symmetric
from lipscope.probes.budget.metrics import read_metric
from lipscope.probes.budget.sites import collect_products, exact_outputs, first_order_errors
from lipscope.probes.budget.subject import read_subject
from tests.probes.budget.tiny import some_ids, tiny

FORMATS = "int8,int4:8,fp8,w8a8,kv4"


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2", "qwen3"])
def test_products_are_those_of_the_derivative(kind):
    subject = read_subject(tiny(kind), some_ids(), head=False, length=64, samples=2)
    formats, metric, seed = read_formats(FORMATS), read_metric("output"), 5
    products = collect_products(subject, formats, metric, 2, seed)
    exact = exact_outputs(subject, metric)
    for f in formats:
        g = torch.Generator().manual_seed(seed)
        Je = first_order_errors(subject, f, metric)
        for b, y in enumerate(exact):
            for k in range(2):
                expected = (metric.probe(y, g) * Je[b]).sum()
                got = products[f.name].t[k, b].sum()
                assert abs(got - expected) <= 1e-5 * Je[b].norm(), (f.name, b, k)


@pytest.mark.wide
def test_a_site_alone_is_one_of_the_products():
    subject = read_subject(tiny("llama"), some_ids(1), head=False, length=64, samples=1)
    metric = read_metric("output")
    (y,) = exact_outputs(subject, metric)
    for name in ("w8a8", "kv4"):
        f = read_format(name)
        products = collect_products(subject, [f], metric, 2, 0)[name]
        v = metric.probe(y, torch.Generator().manual_seed(0))
        for i in range(0, len(products.sites), 5):
            (Je,) = first_order_errors(subject, f, metric, only=products.sites[i])
            assert abs(products.t[0, 0, i] - (v * Je).sum()) <= 1e-5 * Je.norm()


def test_sites_are_complete():
    subject = read_subject(tiny("llama"), some_ids(1), head=False, length=64, samples=1)
    f = read_formats("w8a8,kv8")
    products = collect_products(subject, f, read_metric("output"), 2, 0)
    kinds = [site.kind for site in products["w8a8"].sites]
    assert kinds.count("weight") == kinds.count("activation") == 3 * 7
    assert {(s.layer, s.kind, s.head) for s in products["kv8"].sites} == {
        (layer, kind, head) for layer in range(3) for kind in ("key", "value") for head in range(2)
    }


def test_embeddings_and_a_tied_head_count_only_if_asked():
    def names(kind, embeddings=False):
        subject = read_subject(tiny(kind), some_ids(1), head=True, length=9, samples=1)
        return {w.name for w in subject.weights(embeddings)}

    assert not {"lm_head", "transformer.wte"} & names("gpt2_lm")
    # One site for both: they are one weight.
    assert {"lm_head", "transformer.wte"} & names("gpt2_lm", True) == {"transformer.wte"}
    assert "lm_head" in names("llama_lm")
    assert "model.embed_tokens" in names("llama_lm", True)


@pytest.mark.wide
def test_a_tied_weight_is_rounded_once_for_both_its_uses():
    ids, options = some_ids(2, 12), {"formats": "int8,w8a8", "metric": "kl", "probes": 64}
    got = ls.error_budget(tiny("gpt2_lm"), ids, observe=True, embeddings=True, **options)
    assert any(row.site == "transformer.wte" for row in got.rows)
    for name in got.formats:
        assert 0.75 <= got.observed[name] / got.total(name).value <= 1.3
    without = ls.error_budget(tiny("gpt2_lm"), ids, observe=True, **options)
    assert got.observed["int8"] > 1.02 * without.observed["int8"]


def test_modules_that_do_not_run_are_left_out():
    subject = read_subject(tiny("bert"), some_ids(1), head=False, length=64, samples=1)
    products = collect_products(subject, [read_format("int8")], read_metric("output"), 2, 0)
    assert not any("pooler" in site.name for site in products["int8"].sites)
    assert len(products["int8"].sites) == 3 * 6


def test_keys_and_values_need_a_routed_model():
    layer = torch.nn.Sequential(torch.nn.Embedding(60, 8), torch.nn.Linear(8, 8))
    subject = read_subject(layer, some_ids(1), head=False, length=64, samples=1)
    with pytest.raises(UserError, match="keys and values cannot be reached"):
        collect_products(subject, [read_format("kv8")], read_metric("output"), 2, 0)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(60, 6)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return self.b(torch.tanh(self.a(self.embed(ids))))


def test_the_worst_case_is_at_least_the_dense_one_and_close_to_it():
    model, ids = Two().double(), torch.arange(5)[None]
    budget = ls.error_budget(Two(), ids, formats="int8,int3", probes=2, worst=True)
    with torch.no_grad():
        h = torch.tanh(model.a(model.embed(ids)))
        y = model.b(h)
    for name, bits in (("int8", 8), ("int3", 3)):
        total = 0.0
        for part in (model.a, model.b):
            W = part.weight.detach()
            e = symmetric(W, bits=bits) - W

            def f(weight, part=part):
                key = "a.weight" if part is model.a else "b.weight"
                return torch.func.functional_call(model, {key: weight}, (ids,))

            J = torch.func.jacrev(f)(W).reshape(y.numel(), -1)
            total += float(torch.linalg.matrix_norm(J, 2) * e.norm() / y.norm())
        # Without layers, a site is the weight itself.
        assert total <= budget.worst[name] <= 1.1 * total


@pytest.mark.wide
def test_no_choice_of_signs_exceeds_the_worst_case():
    ids = torch.arange(8)[None]
    budget = ls.error_budget(tiny("gpt2"), ids, formats="int8,kv4", probes=4, worst=True)
    for name in budget.formats:
        apart = sum(row.predicted for row in budget.rows if row.format == name)
        assert apart < budget.worst[name]


def test_a_coarse_reference_has_no_worst_case():
    model = ls.load(tiny("gpt2"), dtype="float32")
    with pytest.raises(ls.UserError, match="worst case needs upper bounds of sigma"):
        ls.error_budget(model, torch.arange(8), formats="int8", probes=2, worst=True)
