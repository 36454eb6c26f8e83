"""Raw exports: operators that work in place become functional, views are tracked (CASES 23)."""

import pytest
import torch
from torch import nn
from transform_checks import check, export, refusal


def example():
    return {"user_dense": torch.randn(8, 6), "item_dense": torch.randn(8, 6)}


class InPlace(nn.Module):
    """`write` changes a copy of the user's vector in place; the score sees the result through every view."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.write = write

    def forward(self, x):
        user = self.write(self.linear(x["user_dense"]))
        return (user.reshape(user.shape[0], -1)[:, :6] * x["item_dense"]).sum(1)


def relu(v):
    return v.relu_()


def relu_without_its_result(v):
    v.relu_()
    return v


def view_made_before(v):
    seen = v.view(-1, 2, 3)
    v.mul_(2.0)
    return seen.transpose(1, 2)


def base_of_a_written_view(v):
    v.view(-1, 2, 3).transpose(1, 2).add_(1.0)
    return v


def column(v):
    v[:, 2] = 0.5
    return v


def slice_through_a_view(v):
    v.view(-1, 2, 3)[:, 1, 1:].mul_(3.0)
    return v


def masked_fill_on_a_slice(v):
    part = v[:, 1:4]
    part.masked_fill_(part > 0, 0.25)
    return v


def mask_assignment(v):
    v[v > 0] = 0.125
    return v


def two_views(v):
    a, b = v[:, :3], v[:, 3:]
    v.add_(1.0)
    return torch.cat([b, a], 1)


def one_after_another(v):
    seen = v[:, :3]
    v.add_(1.0)
    first = seen * 1.0
    v.relu_()
    return torch.cat([first, seen], 1)


def other_type(v):
    return v.mul_(torch.arange(6)).add_(torch.ones(6, dtype=torch.float64))


def shape_in_place(v):
    return v.clone().unsqueeze_(1).add_(1.0).squeeze(1)


def copy(v):
    v.copy_(v.flip(1))
    return v


def zero_row_of_positions(v):
    w = v.view(-1, 2, 3)
    w[:, 0].zero_()
    return w


WRITES = [
    relu, relu_without_its_result, view_made_before, base_of_a_written_view, column, slice_through_a_view,
    masked_fill_on_a_slice, mask_assignment, two_views, one_after_another, other_type, shape_in_place, copy,
    zero_row_of_positions,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
def test_writes_are_seen_through_every_view(tmp_path, write):
    reports = check(InPlace(write), example(), tmp_path, decompose=False)
    # All of it belongs to the user, so nothing but the product needs a copy.
    assert reports["ikbo"]["broadcasts"] <= 1, reports["ikbo"]["stops"]


class CandidateInPlace(nn.Module):
    def forward(self, x):
        both = x["user_dense"] * x["item_dense"]
        both[:, 1:3].add_(x["user_dense"][:, 1:3])
        return both.sigmoid_().sum(1)


def test_writes_into_values_of_both_sides(tmp_path):
    check(CandidateInPlace(), example(), tmp_path, decompose=False)


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        user = self.linear(x["user_dense"])
        with torch.no_grad():
            weights = torch.softmax(user, 1)
            weights.mul_(2.0)
        return (user * weights * x["item_dense"]).sum(1)


def test_regions_without_gradients_are_inlined(tmp_path):
    reports = check(NoGrad(), example(), tmp_path, decompose=False)
    assert reports["ikbo"]["broadcasts"] == 1


class WritesInput(nn.Module):
    def forward(self, x):
        x["user_dense"].relu_()
        return (x["user_dense"] * x["item_dense"]).sum(1)


def test_a_write_into_an_input_is_refused(tmp_path):
    export(WritesInput(), example(), tmp_path / "raw.pt2", decompose=False)
    text = refusal(tmp_path / "raw.pt2")
    assert "relu_" in text and "x_user_dense" in text and "clone" in text, text


class Perhaps(nn.Module):
    """Whether reshape copies depends on strides: nobody should guess whether the write is seen."""

    def forward(self, x):
        user = x["user_dense"].clone().view(-1, 2, 3).transpose(1, 2)
        seen = user.reshape(-1, 6)
        user.mul_(2.0)
        return (seen * x["item_dense"]).sum(1)


def test_unclear_sharing_is_refused(tmp_path):
    export(Perhaps(), example(), tmp_path / "raw.pt2", decompose=False)
    text = refusal(tmp_path / "raw.pt2")
    assert "reshape" in text and "run_decompositions({})" in text, text
