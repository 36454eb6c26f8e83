"""What public ranking models do beyond the plain forms: fields cut apart again, columns picked by a list, one lookup for
both sides, filters in the frequency domain, and operators that change nothing. All in float64: a wrong rewrite shows."""

import pytest
import torch
from torch import nn

from transform_checks import check, command, export, roles, transform

BOTH = {"user_a": (3,), "user_b": (3,), "item_a": (3,), "item_b": (3,)}


def example(rows=8, **sizes):
    return {k: torch.randn(rows, *s, dtype=torch.float64) for k, s in (sizes or BOTH).items()}


def fields(x):
    return torch.stack([x["user_a"], x["item_a"], x["user_b"], x["item_b"]], 1)


def targets(out, role=None):
    return [o["target"].removeprefix("torch.ops.") for o in roles(out).values() if role in (None, o["role"])]


class Cut(nn.Module):
    """Pairs of fields (bilinear interaction): each field on its own, or halves of all of them."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        stacked = fields(x)
        if self.how == "split":
            parts = torch.split(stacked, 1, dim=1)
        elif self.how == "sections":
            parts = [p.sum(1, keepdim=True) for p in torch.split(stacked, [0, 1, 2, 1], dim=1)]
        elif self.how == "chunk":
            parts = [p.sum(1, keepdim=True) for p in stacked.chunk(2, dim=1)]
        elif self.how == "unbind":
            parts = [p.unsqueeze(1) for p in stacked.unbind(1)]
        else:
            first, rest = torch.split(stacked, [1, 2], dim=2)
            parts = [first.expand(-1, -1, 3), torch.cat([rest, first], 2)]
        products = [self.layer(parts[i]) * parts[j] for i in range(len(parts)) for j in range(i + 1, len(parts))]
        return torch.cat(products, 1).sum((1, 2))


@pytest.mark.parametrize("how", ["split", "sections", "chunk", "unbind", "across"])
def test_fields_are_cut_apart_again(tmp_path, how):
    check(Cut(how).double(), example(), tmp_path, tolerance=1e-12)
    if how in ("split", "unbind"):  # the user's fields, their layer and their pair stay with the user
        mine = targets(tmp_path / "model.ikbo.pt2", "request-only")
        assert "aten.linear.default" in mine and "aten.mul.Tensor" in mine, mine


class Picks(nn.Module):
    """One packed matrix, whose columns are picked by a list in the code: a clone of a constant in the graph."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.top = nn.Linear(12, 2)

    def forward(self, x):
        ids = x["X"][:, [3, 0, 1]].long()
        return self.top(self.table(ids).flatten(1))


def test_columns_picked_by_a_list_in_the_code(tmp_path):
    rows = {"X": torch.randint(9, (8, 4)).double()}
    model = Picks().double().eval()
    export(model, rows, tmp_path / "m.pt2")
    report = transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2", "X[:,0:2]")
    assert report["broadcasts"] == 0 and report["ikbo_operators"] == 1, report
    assert command("verify", tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2").returncode == 0


class OneTable(nn.Module):
    """The category of history and target, looked up together in a constant table that is no embedding."""

    def __init__(self):
        super().__init__()
        self.register_buffer("category_of", torch.randint(5, (20,)))
        self.categories = nn.Embedding(5, 4)

    def forward(self, x):
        ids = torch.cat([x["user_history"], x["item"].unsqueeze(1)], 1)
        both = self.categories(self.category_of[ids])
        return (both[:, :-1].tanh() * both[:, -1:]).sum((1, 2))


def test_history_and_target_in_one_lookup_of_a_table(tmp_path):
    rows = {"user_history": torch.randint(20, (8, 7)), "item": torch.randint(20, (8,))}
    check(OneTable().double(), rows, tmp_path, tolerance=1e-12)
    assert {"aten.index.Tensor", "aten.tanh.default"} <= set(targets(tmp_path / "model.ikbo.pt2", "request-only"))


class Frequencies(nn.Module):
    """A history filtered by its frequencies: some are kept, by writing them into zeros."""

    def __init__(self):
        super().__init__()
        self.kept = [0, 2]

    def forward(self, x):
        spectrum = torch.fft.rfft(x["user_history"], dim=1)
        kept = torch.zeros_like(spectrum)
        kept[:, self.kept] = spectrum[:, self.kept] * spectrum[:, self.kept].conj()
        return (torch.fft.irfft(kept, n=6, dim=1).sum(1) * x["item_a"]).sum(1)


def test_pieces_that_are_named_like_the_value_that_they_are_pieces_of(tmp_path):
    """Two pieces of candidates side by side become one, named `cat` like the concatenation of the original."""

    class TwoTargets(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(11, 3))

        def forward(self, x):
            ids = torch.cat([x["user_history"], x["item_id"].unsqueeze(1), x["item_other"].unsqueeze(1)], 1)
            return self.table[ids].sum(1)

    ids = lambda *shape: torch.randint(11, shape)  # noqa: E731
    example = {"user_history": ids(6, 5), "item_id": ids(6), "item_other": ids(6)}
    for decompose in (True, False):
        check(TwoTargets(), example, tmp_path, decompose=decompose)


def test_frequencies_of_a_history(tmp_path):
    rows = {"user_history": torch.randn(8, 6, 3, dtype=torch.float64), "item_a": torch.randn(8, 3, dtype=torch.float64)}
    check(Frequencies(), rows, tmp_path, tolerance=1e-12)
    mine = targets(tmp_path / "model.ikbo.pt2", "request-only")
    assert {"aten.fft_rfft.default", "aten.fft_irfft.default", "aten.index_put.default"} <= set(mine), mine


class Mlp(nn.Module):
    """Linear, batch norm, activation, dropout; the last layer's norm is also read by itself."""

    def __init__(self, activation=torch.relu):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 4)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(4, affine=False)])
        self.dropout = nn.Dropout(0.3)
        self.activation = activation
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

    def forward(self, x):
        hidden = self.dropout(self.activation(self.norms[0](self.first(torch.cat([x["user_a"], x["item_a"]], 1)))))
        last = self.second(hidden)
        return self.norms[1](last).sum(1) + last[:, 0]


@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid, torch.tanh, nn.functional.silu])
def test_norms_and_activations_go_into_the_linear_operator(tmp_path, activation):
    check(Mlp(activation).double(), example(), tmp_path, tolerance=1e-12)
    made = targets(tmp_path / "model.ikbo.pt2")
    assert sum("batch_norm" in t for t in made) == 1, "the second norm's operand is read by others too"
    assert "aten.clone.default" not in made and f"aten.{activation.__name__}.default" not in made, made
    # net-splitting is the original's operators, and so is broadcast
    assert sum("batch_norm" in t for t in targets(tmp_path / "model.split.pt2")) == 2


def test_folded_norms_are_as_exact_as_the_original(tmp_path):
    export(Mlp(), {k: v.float() for k, v in example().items()}, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    result = command("verify", tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert result.returncode == 0, result.stdout + result.stderr


class Repeats(nn.Module):
    """The same layer of the same field once for each pair, and values that are outputs as they are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        pairs = [self.layer(x["item_a"]) * x[other] for other in ("user_a", "user_b", "item_b")]
        copy = x["item_a"].clone()
        return torch.stack([sum(pairs).sum(1), copy.sum(1), torch.rand_like(copy).sum(1) * 0, torch.rand_like(copy).sum(1) * 0], 1)


def test_equal_operators_are_computed_once(tmp_path):
    check(Repeats().double(), example(), tmp_path, tolerance=1e-12)
    made = targets(tmp_path / "model.ikbo.pt2")
    assert made.count("aten.linear.default") == 1, made
    assert made.count("aten.rand_like.default") == 2, "numbers drawn twice are two draws"
    assert targets(tmp_path / "model.split.pt2").count("aten.linear.default") == 3


class Draws(nn.Module):
    def forward(self, x):
        start = torch.randn(x["item_a"].shape[0], 3, dtype=x["item_a"].dtype)
        return ((x["user_a"] + start) * x["item_a"]).sum(1)


def test_a_model_that_draws_random_numbers_is_verified_with_one_seed(tmp_path):
    export(Draws(), {k: v.float() for k, v in example().items()}, tmp_path / "m.pt2")
    report = transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert any("random" in w for w in report["warnings"]), report
    result = command("verify", tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "random numbers" in result.stdout, result.stdout
    # another model that draws alike does not pass for it
    class Other(Draws):
        def forward(self, x):
            return super().forward(x) * 1.01

    export(Other(), {k: v.float() for k, v in example().items()}, tmp_path / "other.pt2")
    assert command("verify", tmp_path / "other.pt2", tmp_path / "m.ikbo.pt2").returncode == 1


class PackedFields(nn.Module):
    """Embeddings side by side with a dimension of one entry between, as deepctr flattens them."""

    def __init__(self, width=5):
        super().__init__()
        self.table, self.top = nn.Embedding(9, width), nn.Linear(3 * width, 4)

    def forward(self, x):
        fields = [self.table(x[name].unsqueeze(1)) for name in ("user_a", "item", "user_b")]
        both = torch.cat(fields, -1)
        assert both.shape[1:] == (1, self.top.in_features)
        return self.top(both.view(both.shape[0], -1)).tanh() + self.top(both).flatten(1)


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
def test_views_that_drop_a_dimension_of_one_entry(tmp_path, decompose):
    rows = {name: torch.randint(9, (8,)) for name in ("user_a", "user_b", "item")}
    reports = check(PackedFields().double(), rows, tmp_path, tolerance=1e-12, decompose=decompose)
    assert reports["ikbo"]["broadcasts"] == 0 and reports["ikbo"]["ikbo_operators"] == 2, reports["ikbo"]


class WideAndWhole(nn.Module):
    """A layer over both sides, which another operator needs together, or not."""

    def __init__(self, user_width, features, whole):
        super().__init__()
        self.whole = whole
        self.layer, self.top = nn.Linear(user_width + 3, features), nn.Linear(1, 1)

    def forward(self, x):
        both = torch.cat([x["user_a"], x["item_a"]], 1)
        y = self.layer(both)
        return y.sum(1) + ((both * torch.sigmoid(y[:, :1])).tanh().sum(1) if self.whole else 0)


@pytest.mark.parametrize(
    ("user_width", "features", "whole", "split"),
    [(2, 1, True, 0), (2, 1, False, 1), (200, 1, True, 1), (2, 16, True, 0), (60, 16, True, 1), (60, 1, True, 0)],
)
def test_layers_over_what_is_whole_are_split_where_it_saves_more_than_it_costs(tmp_path, user_width, features, whole, split):
    rows = {"user_a": torch.randn(8, user_width), "item_a": torch.randn(8, 3)}
    reports = check(WideAndWhole(user_width, features, whole).double(), {k: v.double() for k, v in rows.items()}, tmp_path, tolerance=1e-12)
    assert reports["ikbo"]["ikbo_operators"] == split, reports["ikbo"]
