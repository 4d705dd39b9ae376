"""Optimizers of training: orthogonal updates of matrices, AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from paceline.tools.training.optimizer import Muon, optimizers, orthogonal

pytestmark = pytest.mark.wide


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (3, 24, 40)])
def test_an_orthogonal_update_keeps_singular_vectors_and_makes_their_values_about_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-4
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.mT @ orthogonal(matrix) @ right.mT
    kept = found.diagonal(dim1=-2, dim2=-1)
    assert (found - torch.diag_embed(kept)).abs().max() < 1e-3
    small = values < 0.05 * values.max()
    assert kept[~small].min() > 0.6, "singular values of a twentieth of the largest come near 1"
    assert kept.max() < 1.3


def test_the_matrices_of_a_stack_are_updated_each_for_itself() -> None:
    stack = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    one_by_one = torch.stack([orthogonal(matrix) for matrix in stack])
    assert torch.allclose(orthogonal(stack), one_by_one, atol=1e-5)


def test_a_gradient_of_zeros_changes_nothing_but_the_decay() -> None:
    weight = nn.Parameter(torch.ones(4, 8))
    weight.grad = torch.zeros(4, 8)
    Muon([weight], learning_rate=0.1).step()
    assert torch.allclose(weight, torch.full((4, 8), 1 - 0.1 * 0.01))


def test_an_update_has_the_size_of_adamws() -> None:
    """One learning rate suits both: a step's root mean square is about a fifth of it (2502.16982)."""
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.zeros(64, 256))
    weight.grad = torch.randn(64, 256, generator=generator)
    Muon([weight], learning_rate=0.1).step()
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.3)


def test_matrices_and_stacks_go_to_muon_and_vectors_to_adamw() -> None:
    matrix, stack, vector, wide_vector = (torch.zeros(s) for s in ((4, 8), (2, 4, 8), (8,), (1, 1, 8)))
    muon, adamw = optimizers([matrix, vector, stack, wide_vector], 1e-3)
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    held = [[id(weight) for weight in optimizer.param_groups[0]["params"]] for optimizer in (muon, adamw)]
    assert held == [[id(matrix), id(stack)], [id(vector), id(wide_vector)]]
    assert [type(each) for each in optimizers([matrix], 1e-3)] == [Muon]


def test_products_have_the_autocasts_dtype_and_the_update_is_float32() -> None:
    matrix = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    exact = orthogonal(matrix)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = orthogonal(matrix)
    assert coarse.dtype == torch.float32
    assert 0 < (coarse - exact).abs().max() < 0.1
