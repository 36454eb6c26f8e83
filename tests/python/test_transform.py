"""The transform from the outside: exported models, the command, torch.export.load of the result."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikbo
from conftest import needs_inductor
from transform_checks import MODES, check, command, draw, export, refusal, replicate, roles, transform


class Tower(nn.Module):
    """Two embeddings, a linear layer on the concatenation."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.first, self.second = nn.Linear(17, 12), nn.Linear(12, 1)

    def forward(self, x):
        both = torch.cat([self.users(x["user_id"]), x["user_age"], self.items(x["item"])], dim=1)
        return self.second(torch.relu(self.first(both))).squeeze(1)


def tower_example(rows=8):
    return {"user_id": torch.randint(20, (rows,)), "user_age": torch.randn(rows, 1), "item": torch.randint(30, (rows,))}


def test_concat_and_linear_become_one_ikbo_operator(tmp_path):
    reports = check(Tower(), tower_example(), tmp_path)
    operators = roles(tmp_path / "model.ikbo.pt2")
    kinds = [o["role"] for o in operators.values()]
    assert kinds.count("ikbo") == 1 and "broadcast" not in kinds and "replicated" not in kinds, kinds
    assert "broadcast" in [o["role"] for o in roles(tmp_path / "model.split.pt2").values()]
    assert reports


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_and_other_sizes(backend, tmp_path):
    if backend == "inductor":
        needs_inductor()
    model, example = Tower(), tower_example()
    export(model, example, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    compiled = torch.compile(torch.export.load(tmp_path / "m.ikbo.pt2").module(), backend=backend, dynamic=True)
    for users, candidates in ((3, 7), (2, 50)):
        rows = draw(example, users, candidates)
        index = torch.randint(users, (candidates,), dtype=torch.int32)
        with torch.no_grad():
            torch.testing.assert_close(compiled(rows, index), model(replicate(rows, index)))


def test_module_refuses_sizes_that_disagree(tmp_path):
    export(Tower(), tower_example(), tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    module = torch.export.load(tmp_path / "m.ikbo.pt2").module()
    rows = draw(tower_example(), 3, 7)
    with pytest.raises(AssertionError):
        module(rows, torch.zeros(6, dtype=torch.int32))
    with pytest.raises(AssertionError):
        module({**rows, "user_age": torch.randn(4, 1)}, torch.zeros(7, dtype=torch.int32))


class AttentionUnit(nn.Module):
    """DIN's unit on (batch * length) rows (CASES 18)."""

    def __init__(self, flat):
        super().__init__()
        self.items = nn.Embedding(30, 8)
        self.unit = nn.Sequential(nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 1))
        self.flat = flat

    def forward(self, x):
        history, item = self.items(x["user_items"]), self.items(x["item"])
        length = history.size(1)
        q = item.unsqueeze(1).expand(-1, length, -1)
        features = torch.cat([q, history, q - history, q * history], dim=-1)
        weight = self.unit(features.view(-1, 32)).view(-1, length) if self.flat else self.unit(features).squeeze(-1)
        return (weight.softmax(1).unsqueeze(-1) * history).sum(1).mul(item).sum(1)


@pytest.mark.parametrize("flat", [True, False])
def test_attention_unit(tmp_path, flat):
    example = {"user_items": torch.randint(30, (8, 5)), "item": torch.randint(30, (8,))}
    check(AttentionUnit(flat), example, tmp_path)
    operators = roles(tmp_path / "model.ikbo.pt2").values()
    assert [o["role"] for o in operators].count("ikbo") == 1
    assert [o["role"] for o in operators].count("broadcast") == 1, "one copy of the history serves both products"


class Packed(nn.Module):
    """One matrix whose columns are ids and numbers, as deepctr-torch has it (CASES 20)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.linear = nn.Linear(13, 5)
        self.out = nn.Linear(5, 1)

    def forward(self, matrix):
        parts = [self.a(matrix[:, 0].long()), self.b(matrix[:, 5:6].long()).squeeze(1), matrix[:, 1:4], matrix[:, 3:5]]
        return self.out(torch.relu(self.linear(torch.cat(parts, -1)))).squeeze(1)


@pytest.mark.parametrize("columns", ["X[:,0:3]", "X[:,0:2],X[:,3]", "X[:,4:6]"])
def test_packed_input(tmp_path, columns):
    matrix = torch.cat([torch.randint(9, (8, 1)).float(), torch.randn(8, 4), torch.randint(9, (8, 1)).float()], 1)
    model = Packed().eval()

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, X):  # noqa: N803 - the name users give
            return self.model(X)

    batch = torch.export.Dim("batch")
    exported = torch.export.export(Named(), (matrix,), dynamic_shapes=({0: batch},), strict=False)
    torch.export.save(exported.run_decompositions({}), tmp_path / "m.pt2")
    user = sorted(
        c
        for part in columns.split(",X")
        for c in (lambda r: range(int(r[0]), int(r[-1]) + (len(r) == 1)))(part.split(",")[1].rstrip("]").split(":"))
    )
    item = [c for c in range(6) if c not in user]
    for mode in MODES:
        transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", request_only=columns, mode=mode)
        module = torch.export.load(tmp_path / "m.out.pt2").module()
        rows = matrix[torch.randint(8, (7,))]
        users = matrix[torch.randint(8, (3,))]
        index = torch.tensor([2, 0, 0, 1, 2, 2, 0], dtype=torch.int32)
        full = rows.clone()
        full[:, user] = users[index.long()][:, user]
        with torch.no_grad():
            torch.testing.assert_close(module(rows[:, item], users[:, user], index), model(full))
    result = command("verify", tmp_path / "m.pt2", tmp_path / "m.out.pt2")
    assert result.returncode == 0, result.stdout + result.stderr


class BatchStatistics(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        user = x["user_dense"]
        if self.kind == "batch norm inside forward":  # CASES 24
            user = F.batch_norm(user, None, None, training=True)
        elif self.kind == "mean":  # CASES 22
            user = user - user.mean(0, keepdim=True)
        elif self.kind == "softmax":
            user = user.softmax(0)
        elif self.kind == "batch size":
            user = user / user.shape[0]
        return self.linear(torch.cat([user, x["item_dense"]], 1)).sum(1)


@pytest.mark.parametrize("kind", ["batch norm inside forward", "mean", "softmax", "batch size"])
def test_statistics_of_the_batch_stay_on_the_candidates(tmp_path, kind):
    example = {"user_dense": torch.randn(8, 3), "item_dense": torch.randn(8, 3)}
    reports = check(BatchStatistics(kind), example, tmp_path, tolerance=1e-4)
    if kind == "batch norm inside forward":
        assert any("statistics of the batch" in w for w in reports["ikbo"]["warnings"]), reports["ikbo"]


class Noise(nn.Module):
    def forward(self, x):
        user = x["user_dense"] + torch.rand_like(x["user_dense"])
        return (user * x["item_dense"]).sum(1)


def test_random_operators_are_named_and_not_shared(tmp_path):
    """CASES 26: every candidate draws its own numbers, as in the original."""
    example = {"user_dense": torch.zeros(8, 3), "item_dense": torch.ones(8, 3)}
    export(Noise(), example, tmp_path / "m.pt2")
    report = transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert any("random numbers" in w for w in report["warnings"])
    module = torch.export.load(tmp_path / "m.ikbo.pt2").module()
    scores = module({"user_dense": torch.zeros(1, 3), "item_dense": torch.ones(6, 3)}, torch.zeros(6, dtype=torch.int32))
    assert len(set(scores.tolist())) == 6


class BroadcastsInside(nn.Module):
    """Tiles a request-only vector along a new axis and concatenates along -1 (CASES 21, as far as batches are equal)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(9, 1)

    def forward(self, x):
        tiled = x["user_dense"].unsqueeze(1).repeat(1, 4, 1)
        items = x["item_dense"].view(-1, 4, 6)
        return self.linear(torch.cat([tiled, items], dim=-1)).squeeze(-1).amax(1)


def test_tiled_user_features(tmp_path):
    check(BroadcastsInside(), {"user_dense": torch.randn(8, 3), "item_dense": torch.randn(8, 24)}, tmp_path)


class Unused(nn.Module):
    """Inputs that nothing reads, dead nodes, a check of metadata, a tied weight (CASES 28, 29)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(10, 3)[2:8], persistent=False)

    def forward(self, x):
        dead = x["user_dense"] * 3  # noqa: F841
        both = torch.cat([x["user_dense"].float(), x["item_dense"] + self.table[0]], 1)
        return self.second(self.first(both)).sum(1)


def test_unused_inputs_dead_nodes_and_tied_weights(tmp_path):
    example = {"user_dense": torch.randn(8, 3), "user_unused": torch.randn(8, 2), "item_dense": torch.randn(8, 3),
               "item_unused": torch.zeros(8, dtype=torch.int64)}  # fmt: skip
    check(Unused(), example, tmp_path)


def test_equal_example_batches_stay_two_batches(tmp_path):
    """CASES 15: nothing in the result says that there are as many users as candidates."""
    export(Tower(), tower_example(4), tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    loaded = torch.export.load(tmp_path / "m.ikbo.pt2")
    shapes = {n.name: n.meta["val"].shape for n in loaded.graph.nodes if n.op == "placeholder" and "val" in n.meta}
    assert str(shapes["x_user_id"][0]) != str(shapes["x_item"][0])
    assert str(shapes["candidate_to_user"][0]) == str(shapes["x_item"][0])


def test_example_batch_of_one_is_refused_with_the_reason(tmp_path):
    """CASES 16: torch.export freezes a batch of 1; the message says what to do."""
    example = tower_example(1)
    exported = torch.export.export(Tower().eval(), (example,), strict=False)
    torch.export.save(exported.run_decompositions({}), tmp_path / "m.pt2")
    text = refusal(tmp_path / "m.pt2")
    assert "dynamic batch" in text and "user_id" in text, text


def test_separate_batch_symbols_are_taken_as_one(tmp_path):
    class Dot(nn.Module):
        def forward(self, x):
            return x["user_a"].sum() * 0 + (x["item_a"] * 2).sum(1)

    auto = torch.export.Dim.AUTO
    example = {"user_a": torch.randn(8, 3), "item_a": torch.randn(8, 3)}
    export(Dot(), example, tmp_path / "m.pt2", dynamic=({k: {0: auto} for k in example},))
    report = transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert any("separate batch sizes" in w for w in report["warnings"]), report


def test_bad_requests(tmp_path):
    export(Tower(), tower_example(), tmp_path / "m.pt2")
    assert "matches no input" in refusal(tmp_path / "m.pt2", "users")
    assert "item" in refusal(tmp_path / "m.pt2", "users"), "the inputs are listed"
    assert "no input is left" in refusal(tmp_path / "m.pt2", "user_*,item")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert "transformed already" in refusal(tmp_path / "m.ikbo.pt2")

    class UserOnly(nn.Module):
        def forward(self, x):
            return x["user_dense"].sum(1)

    export(UserOnly(), {"user_dense": torch.randn(8, 3), "item": torch.randn(8, 2)}, tmp_path / "u.pt2")
    assert "no output depends" in refusal(tmp_path / "u.pt2")


def test_archive_without_sample_inputs(tmp_path):
    """CASES 30."""
    exported = export(Tower(), tower_example(), tmp_path / "with.pt2")
    exported.example_inputs = None
    torch.export.save(exported, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    model = torch.export.load(tmp_path / "m.ikbo.pt2")
    rows = draw(tower_example(), 3, 7)
    model.module()(rows, torch.zeros(7, dtype=torch.int32))


def test_specification_speaks_of_both_batches(tmp_path):
    export(Tower(), tower_example(), tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    specification = json.loads(command("spec", tmp_path / "m.ikbo.pt2", "--json").stdout)
    sizes = {d["size"] for o in specification["operators"] for r in o["results"] for d in r["dims"]}
    assert {"B_user", "B_cand"} <= sizes
    assert {i["name"]: i["side"] for i in specification["inputs"]} == {
        "user_id": "request-only", "user_age": "request-only", "item": "candidate", "candidate_to_user": "index"
    }  # fmt: skip


def test_direct_adoption_agrees_with_the_transform(tmp_path):
    """A model author who calls the operators gets what the transform makes of the standard ones."""
    model, example = Tower().eval(), tower_example()
    export(model, example, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    rows = draw(example, 3, 7)
    index = torch.tensor([0, 2, 2, 1, 0, 0, 1], dtype=torch.int32)
    with torch.no_grad():
        user = torch.cat([model.users(rows["user_id"]), rows["user_age"]], 1)
        weight = model.first.weight
        hidden = ikbo.linear(model.items(rows["item"]), weight[:, 9:], [user], [weight[:, :9]], [index],
                             model.first.bias, "relu")  # fmt: skip
        by_hand = model.second(hidden).squeeze(1)
        given = torch.export.load(tmp_path / "m.ikbo.pt2").module()(rows, index)
    torch.testing.assert_close(given, by_hand)


class SizesOfData(nn.Module):
    """Products of pairs of fields, picked by a mask: a size that depends on data (FuxiCTR's inner product layer)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("pairs", torch.ones(4, 4).triu(1).bool())

    def forward(self, x):
        fields = torch.stack([x["user_a"], x["user_b"], x["item_a"], x["item_b"]], 1)
        products = torch.bmm(fields, fields.transpose(1, 2))
        return torch.masked_select(products, self.pairs).view(-1, 6).sum(1)


def test_sizes_that_depend_on_data(tmp_path):
    check(SizesOfData(), {name: torch.randn(8, 5) for name in ("user_a", "user_b", "item_a", "item_b")}, tmp_path)


class OneLookup(nn.Module):
    """History and target concatenated before one lookup, then split again; features of items in constant tables (CASES
    19, 27)."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(20, 6)
        self.register_buffer("category_of", torch.randint(5, (20,)))
        self.categories = nn.Embedding(5, 3)
        self.unit = nn.Linear(36, 1)

    def forward(self, x):
        ids = torch.cat([x["user_history"], x["item"].unsqueeze(1)], 1)
        both = torch.cat([self.items(ids), self.categories(self.category_of[ids])], 2)
        history, target = both[:, :-1], both[:, -1:].expand(-1, 7, -1)
        weights = self.unit(torch.cat([history, target, history - target, history * target], 2))
        return (weights * history).sum(1) @ torch.ones(9)


def test_history_and_target_in_one_lookup(tmp_path):
    example = {"user_history": torch.randint(20, (8, 7)), "item": torch.randint(20, (8,))}
    check(OneLookup(), example, tmp_path)
    lookups = [n for n, o in roles(tmp_path / "model.ikbo.pt2").items() if o["role"] == "request-only" and "embedding" in n]
    assert lookups, "the history's embeddings are looked up once a user"
