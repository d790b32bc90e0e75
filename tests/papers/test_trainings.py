"""Models trained together learn what each learns alone, and do not touch each other."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.language_model import Architecture, CharacterLSTM, CharacterTransformer
from lipscope.papers.trainings import Plan, Stack

TEXT = CharacterText.of("to be, or not to be: that is the question. " * 9, 8)
STEPS, BATCH = 4, 3
FIXED = Plan((), (), (), steps=STEPS, batch=BATCH, warmup=0, decay=False, clip=None, every=STEPS)


def architecture(attention: str, invertible: bool = False) -> Architecture:
    return Architecture(len(TEXT.alphabet), attention, 2, 8, 2, 8, invertible)


def alone(a: Architecture, seed: int, rate: float, build=CharacterTransformer):
    """The same training spelled out, one model, torch's own Adam."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(a)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    starts = torch.randint(
        len(TEXT.learned) - a.context, (STEPS, BATCH), generator=torch.Generator().manual_seed(seed)
    )
    for row in starts:
        places = row[:, None] + torch.arange(a.context)
        loss = cross_entropy(
            model(TEXT.learned[places]).flatten(0, 1), TEXT.learned[places + 1].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("attention", "invertible", "norm"),
    [
        ("dot", False, "post"),
        ("l2", False, "none"),
        ("cosine", False, "pre"),
        ("contractive", True, "pre"),
        ("contractive-ball", True, "none"),
    ],
)
def test_a_stack_trains_each_member_as_if_it_were_alone(attention, invertible, norm):
    check_members(replace(architecture(attention, invertible), norm=norm))


def test_a_stack_trains_other_models_too():
    check_members(architecture("dot"), CharacterLSTM)


def check_members(a: Architecture, build=CharacterTransformer):
    stack = Stack(a, [3, 4], [1e-2, 1e-3], "cpu", build)
    stack.train(TEXT, replace(FIXED, clip=0.5))
    for member, (seed, rate) in enumerate(((3, 1e-2), (4, 1e-3))):
        expected = alone(a, seed, rate, build).state_dict()
        for name, weight in stack.model(member).state_dict().items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-5, msg=name)


def test_the_history_is_what_each_step_saw():
    a = architecture("dot")
    stack = Stack(a, [3, 4], [1e-2, 1e-3], "cpu")
    before = stack.theta.detach().clone()
    history = stack.train(TEXT, FIXED)
    assert history.losses.shape == history.gradients.shape == history.weights.shape == (STEPS, 2)
    torch.testing.assert_close(history.weights[0], before.norm(dim=1))
    starts = torch.randint(
        len(TEXT.learned) - 8, (STEPS, BATCH), generator=torch.Generator().manual_seed(4)
    )[0]
    places = starts[:, None] + torch.arange(8)
    model = Stack(a, [4], [1e-3], "cpu").model(0)
    loss = cross_entropy(
        model(TEXT.learned[places]).flatten(0, 1), TEXT.learned[places + 1].flatten()
    )
    loss.backward()
    length = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(history.losses[0, 1], loss.detach())
    torch.testing.assert_close(history.gradients[0, 1], length)


def test_a_member_that_diverges_leaves_the_others_alone():
    a = architecture("dot")
    pair = Stack(a, [0, 1], [float("inf"), 1e-3], "cpu")
    pair.train(TEXT, FIXED)
    single = Stack(a, [1], [1e-3], "cpu")
    single.train(TEXT, FIXED)
    assert not pair.theta[0].isfinite().any()
    torch.testing.assert_close(pair.theta[1], single.theta[0], rtol=1e-3, atol=2e-5)


def test_losses_are_those_of_the_members():
    a = architecture("l2")
    stack = Stack(a, [0, 1, 2], [1e-3] * 3, "cpu")
    inputs, targets = TEXT.test_windows(4, a.context)
    together = stack.losses(stack.theta, inputs, targets)
    for member in range(3):
        logits = stack.model(member)(inputs)
        torch.testing.assert_close(
            together[member], cross_entropy(logits.flatten(0, 1), targets.flatten())
        )
