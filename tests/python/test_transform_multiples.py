"""Linear layers over multiples of other rows, `W (a x + c)`: taken before the multiplication. What becomes of cross
networks, that they mean the same, and what is left as it is."""

import pytest
import torch
from torch import nn

import ikbo  # noqa: F401 - torch.export.load needs the operators
from transform_checks import check, command, export, roles, transform

WIDTH = 8
EXAMPLE = {"user_a": torch.randn(8, 5), "item_a": torch.randn(8, 3), "user_b": torch.randn(8, WIDTH), "item_b": torch.randn(8, WIDTH)}


class Crosses(nn.Module):
    def __init__(self, form, layers=3):
        super().__init__()
        self.form = form
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(1, WIDTH) / 4) for _ in range(layers)])
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(layers)])
        self.all_biases = nn.Parameter(torch.randn(layers, WIDTH, 1))
        self.deep = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU())
        self.last = nn.Linear(WIDTH + 6, 1)
        self.last_of_cross, self.few = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)
        self.many = nn.Linear(WIDTH, 2 * WIDTH)
        self.one_more = nn.Linear(WIDTH, 1)
        self.twice = nn.Parameter(torch.randn(2, 2 * WIDTH))

    def forward(self, x):
        return self.form(self, torch.cat([x["user_a"], x["item_a"]], 1), x)

    def scaled(self, x):
        return x * self.one_more(x)

    def crossed(self, x0):
        x = x0
        for w, b in zip(self.weights, self.biases):
            x = x0 * nn.functional.linear(x, w) + b + x
        return x

    def with_columns(self, x0):  # deepctr
        x0 = x0.unsqueeze(2)
        x = x0
        for i, w in enumerate(self.weights):
            x = torch.matmul(x0, torch.tensordot(x, w.t(), dims=([1], [0]))) + self.all_biases[i] + x
        return x.squeeze(2)

    def transposed(self, x0):  # recbole
        x = x0
        for w, b in zip(self.weights, self.biases):
            x = (x0.transpose(0, 1) * torch.tensordot(x, w[0], dims=([1], [0]))).transpose(0, 1) + b + x
        return x


def head(m, cross, x0):
    return m.last(torch.cat([cross, m.deep(x0)], 1))


TAKEN = {
    "rows": lambda m, x, _: head(m, m.crossed(x), x),
    "columns": lambda m, x, _: head(m, m.with_columns(x), x),
    "transposed": lambda m, x, _: head(m, m.transposed(x), x),
    "cross alone": lambda m, x, _: m.last_of_cross(m.crossed(x)),
    "behind dropout": lambda m, x, _: m.last(nn.functional.dropout(torch.cat([m.deep(x), m.crossed(x)], -1), 0.5, training=False)),
    "read twice": lambda m, x, _: head(m, m.crossed(x), x) + m.crossed(x).tanh().sum(1, keepdim=True),
    "two results": lambda m, x, _: torch.cat([m.last_of_cross(m.crossed(x)), m.few(m.crossed(x))], 1),
    "a gated user": lambda m, x, rows: m.few(rows["user_b"] * torch.sigmoid(m.one_more(rows["item_b"]))),
    "a gate and a constant": lambda m, x, rows: m.few(m.biases[0] + torch.sigmoid(m.one_more(x)) * rows["user_b"]),
    "two bases": lambda m, x, rows: nn.functional.linear(
        torch.cat([m.crossed(x), m.crossed(rows["user_b"]), rows["item_b"]], 1), torch.cat([m.few.weight, m.few.weight, m.few.weight], 1)
    ),
    "by a matrix": lambda m, x, _: m.crossed(x) @ m.few.weight.t(),
    "one twice side by side": lambda m, x, _: torch.cat([m.crossed(x)] * 2, 1) @ m.twice.t(),
}
KEPT = {
    "read by something else": lambda m, x, rows: torch.tanh(x * m.one_more(x) + m.biases[0]).sum(1),
    "more results than entries": lambda m, x, rows: m.many(rows["user_b"] * m.one_more(x)).sum(1),
    "a number an entry": lambda m, x, rows: m.few(x * rows["item_b"] + rows["user_b"]),
    "an offset that is multiplied": lambda m, x, rows: m.few((rows["item_b"] + m.biases[0]) * rows["user_b"]),
    "contracted side by side": lambda m, x, _: torch.tensordot(torch.cat([m.scaled(x), m.deep(x)], 1), m.last.weight[0], dims=([1], [0])),
    "sums of two bases": lambda m, x, rows: m.few(x * m.one_more(x) + rows["user_b"] * m.one_more(rows["item_b"])),
}


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
def test_all_of_them_mean_the_same(tmp_path, decompose):
    forms = [*TAKEN.values(), *KEPT.values()]
    model = Crosses(lambda m, x, rows: torch.cat([form(m, x, rows).reshape(x.shape[0], -1) for form in forms], 1))
    check(model.double(), {k: v.double() for k, v in EXAMPLE.items()}, tmp_path, tolerance=1e-12, decompose=decompose)


@pytest.mark.parametrize("name", [*TAKEN, *KEPT])
def test_what_is_taken_and_its_error_in_single_precision(tmp_path, name):
    export(Crosses((TAKEN | KEPT)[name]), EXAMPLE, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert any("_weights" in k for k in torch.export.load(tmp_path / "m.ikbo.pt2").state_dict) == (name in TAKEN)
    result = command("verify", tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["rows", "columns", "transposed"])
def test_a_cross_network_is_one_product_of_both_sides(tmp_path, name):
    export(Crosses(TAKEN[name]), EXAMPLE, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    operators = [o["target"].split(".")[-2] for o in roles(tmp_path / "m.ikbo.pt2").values()]
    assert not any(o["target"] == "torch.ops.ikbo.broadcast.default" for o in roles(tmp_path / "m.ikbo.pt2").values())
    assert operators.count("linear") == 3, operators  # crosses, first deep layer, and the head over the deep side


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_keep_their_roundings(tmp_path, dtype):
    model = Crosses(TAKEN["rows"]).to(dtype)
    export(model, {k: v.to(dtype) for k, v in EXAMPLE.items()}, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert not any("addcmul" in o["target"] for o in roles(tmp_path / "m.ikbo.pt2").values())
