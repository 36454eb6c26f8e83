"""What is asked of the transform and cannot be done: one clear message each."""

import pytest
import torch
from test_transform import export, refusal
from torch import nn


class Both(nn.Module):
    def forward(self, X, table):  # noqa: N803 - the name users give
        return (X[:, :2] * X[:, 2:4]).sum(1) + table.sum()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("requests") / "m.pt2"
    batch = torch.export.Dim("batch")
    exported = torch.export.export(Both(), (torch.randn(8, 4), torch.randn(3, 2)), dynamic_shapes=({0: batch}, None))
    torch.export.save(exported.run_decompositions({}), path)
    return path


@pytest.mark.parametrize(
    "asked, expected",
    [
        ("X[:,0:2],X[:,1:3]", ["twice", "column", "X"]),
        ("X,X[:,0:2]", ["twice", "X"]),
        ("table,X[:,0:2]", ["table", "first dimension", "dynamic batch"]),
        ("nobody_*", ["nobody_*", "matches no input", "X", "table"]),
        ("X[:,2:9]", ["X", "columns 0 to 3"]),
        ("X[:,a:b]", ["X[:,from:to]"]),
        ("X", ["no input is left"]),
    ],
)
def test_what_cannot_be_asked(archive, asked, expected):
    text = refusal(archive, asked)
    for part in expected:
        assert part in text, text
    assert len(text.strip().splitlines()) <= 4, text


class UserScores(nn.Module):
    def forward(self, x):
        return x["user_dense"].sum(1)


def test_scores_that_no_candidate_changes(tmp_path):
    export(UserScores(), {"user_dense": torch.randn(8, 3), "item_dense": torch.randn(8, 3)}, tmp_path / "m.pt2")
    assert "nothing to rank" in refusal(tmp_path / "m.pt2")
