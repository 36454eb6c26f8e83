"""Operators that are replaced by others: cheaper ones in mode `ikbo`, embedding bags in all. What they become, and that
they mean the same."""

import pytest
import torch
from torch import nn

import ikbo  # noqa: F401 - torch.export.load needs the operators
from transform_checks import check, command, draw, export, replicate, roles, transform

FIELDS, WIDTH = 5, 4


class Forms(nn.Module):
    def __init__(self, forms):
        super().__init__()
        self.forms = forms
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.experts = nn.Parameter(torch.randn(2, 3, WIDTH))
        self.a_field = nn.Parameter(torch.randn(FIELDS, WIDTH, 3))
        self.register_buffer("upper", torch.ones(FIELDS, FIELDS).triu(1).bool())
        self.register_buffer("first", torch.tensor([0, 0, 1, 3]))
        self.register_buffer("table", torch.tensor([[0, 4], [2, 1]]))
        self.register_buffer("from_the_end", torch.tensor([0, -1]))

    def forward(self, x):
        fields = torch.stack([x["user_a"], x["item_a"], x["user_b"], x["item_b"], x["user_a"] * x["item_b"]], 1)
        return tuple(form(self, x, fields) for form in self.forms.values())


def column(x, name="item_a"):
    return x[name].unsqueeze(-1)


def written(values, columns, width):
    """As DMF makes a user's row of the interaction matrix."""
    rows = torch.arange(values.shape[0]).repeat_interleave(values.shape[1], dim=0)
    matrix = torch.zeros(1, dtype=values.dtype).repeat(values.shape[0], width)
    return torch.index_put(matrix, (rows, columns.flatten()), values.flatten())


# What the original's operator becomes; nothing: it stays.
REPLACED = {
    "a matrix times columns": ("linear", lambda m, x, f: (m.weight @ column(x)).squeeze(-1)),
    "of the user": ("linear", lambda m, x, f: (m.weight @ column(x, "user_a") * column(x)[:, :1]).squeeze(-1)),
    "an expert's matrix": ("linear", lambda m, x, f: torch.tanh(m.experts[1].t().t() @ (column(x) + column(x, "user_b")))),
    "columns of fields": ("linear", lambda m, x, f: m.weight @ f.unsqueeze(-1)),
    "a matrix a field, rows": ("bmm", lambda m, x, f: torch.matmul(f.unsqueeze(2), m.a_field).squeeze(2)),
    "a matrix a field, columns": ("bmm", lambda m, x, f: torch.matmul(m.a_field.transpose(1, 2), f.unsqueeze(3)).squeeze(3)),
    "an outer product": ("mul", lambda m, x, f: column(x) @ column(x, "user_a").mT),
    "a scaled column": ("mul", lambda m, x, f: torch.bmm(column(x), column(x)[:, :1])),
    "pairs by a mask": ("index_select", lambda m, x, f: torch.masked_select(f @ f.mT, m.upper).view(-1, 10)),
    "stretches by a mask": (
        "index_select",
        lambda m, x, f: torch.masked_select(f.unsqueeze(1) * f.unsqueeze(2), m.upper.unsqueeze(-1)).view(-1, 10, WIDTH),
    ),
    "positions": ("index_select", lambda m, x, f: f.cumsum(1)[:, m.first]),
    "positions of a table": ("index_select", lambda m, x, f: f.cumsum(1)[:, m.table[1]] + f.cumsum(1)[:, m.table[:, 0]]),
    "writes by row and column": (
        "scatter",
        lambda m, x, f: written(x["user_a"], torch.argsort(x["user_b"], 1), 5) + written(x["item_a"], torch.argsort(x["item_b"], 1), 5),
    ),
    "writes counted from the end": (
        "scatter",
        lambda m, x, f: written(x["user_a"], torch.argsort(x["user_b"], 1) - 2, 5) + written(x["item_a"], torch.argsort(x["item_b"], 1) - 5, 5),
    ),
    "positions in the code": ("index_select", lambda m, x, f: f.cumsum(1)[:, [0, 3, 3]] * f.cumsum(1)[:, [1, 2, 4]]),
}
KEPT = {
    "positions from the end": ("index", lambda m, x, f: f.cumsum(1)[:, m.from_the_end]),
    "a mask of the candidate": ("masked_select", lambda m, x, f: torch.masked_select(x["item_a"], x["item_a"] * 0 == 0).view(-1, WIDTH)),
    "a matrix times a matrix": ("matmul", lambda m, x, f: m.a_field[0].t() @ f.mT),
}


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
def test_cheaper_operators_mean_the_same(tmp_path, decompose):
    forms = {name: form for name, (_, form) in (REPLACED | KEPT).items()}
    example = {name: torch.randn(8, WIDTH).double() for name in ("user_a", "user_b", "item_a", "item_b")}
    model = Forms(forms).double().eval()
    export(model, example, tmp_path / "m.pt2", decompose=decompose)
    for mode in ("ikbo", "split"):
        transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", mode=mode)
        module = torch.export.load(tmp_path / "m.out.pt2").module()
        for users, candidates in ((4, 9), (5, 5), (1, 3), (6, 2), (8, 1)):
            rows, index = draw(example, users, candidates), torch.randint(users, (candidates,), dtype=torch.int32)
            with torch.no_grad():
                for name, given, expected in zip(forms, module(rows, index), model(replicate(rows, index))):
                    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{mode}, {name}: {m}")
    export(model.float(), {k: v.float() for k, v in example.items()}, tmp_path / "single.pt2", decompose=decompose)
    transform(tmp_path / "single.pt2", tmp_path / "single.ikbo.pt2")
    result = command("verify", tmp_path / "single.pt2", tmp_path / "single.ikbo.pt2")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", [*REPLACED, *KEPT])
def test_what_an_operator_becomes(tmp_path, name):
    target, form = (REPLACED | KEPT)[name]
    example = {name: torch.randn(8, WIDTH) for name in ("user_a", "user_b", "item_a", "item_b")}
    export(Forms({name: form}), example, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    targets = [o["target"].split(".")[-2] for o in roles(tmp_path / "m.ikbo.pt2").values()]
    assert target in targets, targets
    if target == "scatter":
        written_to = [o["role"] for o in roles(tmp_path / "m.ikbo.pt2").values() if "scatter" in o["target"]]
        assert written_to == ["request-only", "candidate"], written_to
    if name in REPLACED:
        costly = {"linear": "matmul", "bmm": "matmul", "mul": "matmul", "scatter": "index_put"}.get(target, "masked_select" if "mask" in name else "index")
        assert costly not in targets or name == "pairs by a mask", targets


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.of_users, self.of_items = nn.EmbeddingBag(11, WIDTH, **options), nn.EmbeddingBag(11, WIDTH, **options)

    def forward(self, x):
        return (self.of_users(x["user_items"]) * self.of_items(x["item_tags"])).sum(1)


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_of_one_length(tmp_path, mode, padding, decompose):
    example = {"user_items": torch.randint(3, (8, 5)), "item_tags": torch.randint(3, (8, 2))}  # whole bags of padding too
    check(Bags(mode=mode, padding_idx=padding), example, tmp_path, decompose=decompose)
    operators = roles(tmp_path / "model.split.pt2").values()
    if padding is None or mode != "max":
        assert any(o["role"] == "request-only" and "embedding" in o["target"] for o in operators), operators
        assert not any("embedding_bag" in o["target"] for o in operators)


def test_padding_counted_from_the_end_of_the_table(tmp_path):
    class FromTheEnd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, WIDTH)

        def forward(self, x):
            bags = []
            for ids in (x["user_items"], x["item_tags"]):
                offsets = torch.arange(0, ids.numel(), ids.shape[1])
                bags.append(torch.embedding_bag(self.table.weight, ids.reshape(-1), offsets, False, 0, False, None, False, -1)[0])
            return (bags[0] * bags[1]).sum(1)

    example = {"user_items": torch.randint(3, (8, 5)), "item_tags": torch.randint(3, (8, 2))}
    for decompose in (False, True):
        check(FromTheEnd(), example, tmp_path, decompose=decompose)
