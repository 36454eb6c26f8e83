"""Embedding bags of many lengths, given as values and offsets: their batch lies in the offsets. Request-only ones run once a
user; those of the candidates stay as they are. Requests give lists, of which the runtime makes values and offsets."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikbo  # noqa: F401 - torch.export.load needs the operators
from test_runtime import run, write_inputs
from transform_checks import MODES, command, roles

VOCABULARY, WIDTH, ROWS = 11, 4, 5
MAPPINGS = {"unsorted": (4, [3, 0, 1, 3, 0, 0, 3]), "uneven": (3, [0, 0, 0, 0, 2]), "one user": (1, [0, 0]), "equal": (3, [2, 0, 1])}


def bags(rows, longest=4):
    """Offsets with the end, and as many values and weights as they say; the first bag is empty."""
    lengths = torch.randint(longest + 1, (rows,))
    lengths[-1] = 3  # an export takes sizes of 0 and 1 for constants
    lengths[0] = 0
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(bounds[-1])
    return bounds, torch.randint(VOCABULARY, (total,)), torch.randn(total, dtype=torch.double)


def side(prefix, rows):
    bounds, values, weights = bags(rows)
    starts, tags, _ = bags(rows)
    return {
        f"{prefix}_values": values, f"{prefix}_weights": weights, f"{prefix}_offsets": bounds,
        f"{prefix}_tags": tags, f"{prefix}_starts": starts[:-1].int(),
        f"{prefix}_dense": torch.randn(rows, WIDTH, dtype=torch.double),
    }  # fmt: skip


def draw(users, candidates):
    return {**side("user", users), **side("item", candidates)}


def select(x, index, prefix="user"):
    """What the original takes: each candidate's own copy of its user's bags."""
    out = dict(x)
    for offsets, values in (("offsets", ("values", "weights")), ("starts", ("tags",))):
        starts = x[f"{prefix}_{offsets}"].long()
        if offsets == "starts":
            starts = torch.cat([starts, torch.tensor([len(x[f"{prefix}_tags"])])])
        mine = [torch.arange(starts[u], starts[u + 1]) for u in index]
        bounds = torch.tensor([0] + [len(m) for m in mine]).cumsum(0)
        out[f"{prefix}_{offsets}"] = (bounds if offsets == "offsets" else bounds[:-1]).to(x[f"{prefix}_{offsets}"].dtype)
        for name in values:
            out[f"{prefix}_{name}"] = x[f"{prefix}_{name}"][torch.cat(mine)]
    out[f"{prefix}_dense"] = x[f"{prefix}_dense"][index]
    return out


class Bags(nn.Module):
    """Every form is one output, of the user's and the item's bags."""

    def __init__(self, *forms):
        super().__init__()
        self.forms = forms
        self.ids = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Embedding(VOCABULARY, 1)
        self.layer = nn.Linear(3 * WIDTH, 3)

    def forward(self, x):
        outputs = []
        for form in self.forms:
            user, item = ({k.removeprefix(p + "_"): v for k, v in x.items() if k.startswith(p)} for p in ("user", "item"))
            outputs.append(self.layer(torch.cat([form(self, user), form(self, item) * user["dense"], item["dense"]], 1)))
        return tuple(outputs)


def bag(m, x, mode="sum", **more):
    return F.embedding_bag(x["values"], m.ids.weight, x["offsets"], mode=mode, include_last_offset=True, **more)


FORMS = {
    "sum": bag,
    "mean": lambda m, x: bag(m, x, "mean"),
    "max": lambda m, x: bag(m, x, "max"),
    "padding left out": lambda m, x: bag(m, x, "mean", padding_idx=3),
    "weights given": lambda m, x: bag(m, x, per_sample_weights=x["weights"]),
    "weights computed": lambda m, x: bag(m, x, per_sample_weights=torch.sigmoid(x["weights"] * 2) + 1),
    "weights looked up": lambda m, x: bag(m, x, per_sample_weights=m.scale(x["values"]).squeeze(-1)),
    "weights of ones": lambda m, x: bag(m, x, per_sample_weights=torch.ones_like(x["weights"])),
    "ids hashed": lambda m, x: F.embedding_bag((x["values"] * 7 + 1) % VOCABULARY, m.ids.weight, x["offsets"], include_last_offset=True),
    "without the end": lambda m, x: F.embedding_bag(x["tags"], m.ids.weight, x["starts"].long(), mode="sum"),
    "int32 offsets": lambda m, x: F.embedding_bag(x["tags"].int(), m.ids.weight, x["starts"], mode="mean"),
    "the end cut off": lambda m, x: F.embedding_bag(x["values"], m.ids.weight, x["offsets"][:-1], mode="sum"),
    "a table computed": lambda m, x: F.embedding_bag(x["values"], m.ids.weight * 2, x["offsets"], mode="sum", include_last_offset=True),
    "two bags": lambda m, x: bag(m, x) * F.embedding_bag(x["tags"], m.ids.weight, x["starts"].long(), mode="max"),
}


def export(model, inputs, path, decompose=True, dynamic=None):
    batch = torch.export.Dim("batch")
    sizes = {k: {0: torch.export.Dim("v_" + k.split("_")[0])} for k in inputs if k.endswith(("values", "weights"))}
    sizes |= {k: {0: torch.export.Dim("t_" + k.split("_")[0])} for k in inputs if k.endswith("tags")}
    sizes |= {k: {0: batch + 1} for k in inputs if k.endswith("offsets")}
    sizes = {k: sizes.get(k, {0: batch}) for k in inputs} | (dynamic or {})
    exported = torch.export.export(model.double().eval(), (inputs,), dynamic_shapes=(sizes,), strict=False)
    torch.export.save(exported.run_decompositions({}) if decompose else exported, path)


def transform(path, out, mode="ikbo", request_only="user_*"):
    result = command("transform", path, "--request-only", request_only, "-o", out, "--mode", mode)
    return result.returncode, result.stdout + result.stderr


def refusal(tmp_path, form, request_only="user_*", inputs=None, dynamic=None):
    model = Bags(FORMS["sum"], form)
    export(model, inputs or draw(ROWS, ROWS), tmp_path / "m.pt2", dynamic=dynamic)
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", request_only=request_only)
    assert code == 2, text
    return text


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
def test_bags_of_the_user_run_once_a_user(tmp_path, decompose):
    model, path, out = Bags(*FORMS.values()), tmp_path / "m.pt2", tmp_path / "m.out.pt2"
    export(model, draw(ROWS, ROWS), path, decompose)
    for mode in MODES:
        code, text = transform(path, out, mode)
        assert code == 0, text
        module = torch.export.load(out).module()
        for name, (users, index) in MAPPINGS.items():
            x, index = draw(users, len(index)), torch.tensor(index, dtype=torch.int32)
            with torch.no_grad():
                for form, given, expected in zip(FORMS, module(x, index), model(select(x, index))):
                    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{mode}, {form}, {name}: {m}")
        of_bags = [o for o in roles(out).values() if "embedding_bag" in o["target"]]
        sizes = [o["results"][0]["dims"][0]["size"] for o in of_bags]
        assert sorted(set(sizes)) == ["B_cand", "B_user"] and sizes.count("B_user") == sizes.count("B_cand")
        verified = command("verify", path, out)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_sides_and_bags_are_in_the_specification(tmp_path):
    export(Bags(FORMS["weights given"], FORMS["without the end"]), draw(ROWS, ROWS), tmp_path / "m.pt2")
    assert transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2")[0] == 0
    spec = json.loads(command("spec", tmp_path / "m.out.pt2", "--json").stdout)
    sides = {i["name"]: i["side"] for i in spec["inputs"]}
    assert sides["user_values"] == sides["user_offsets"] == "request-only" and sides["item_values"] == "candidate"
    jagged = {j["offsets"]: (sorted(j["values"]), j["includes_end"]) for j in spec["jagged"]}
    assert jagged["x_user_offsets"] == (["x_user_values", "x_user_weights"], True)
    assert jagged["x_user_starts"] == (["x_user_tags"], False)
    again = torch.export.load(tmp_path / "m.out.pt2")
    with torch.no_grad():
        again.module()(*again.example_inputs[0], **again.example_inputs[1])


def test_bags_of_candidates_alone(tmp_path):
    model, path, out = Bags(*FORMS.values()), tmp_path / "m.pt2", tmp_path / "m.out.pt2"

    class ItemBags(Bags):
        def forward(self, x):
            own = {k.removeprefix("item_"): v for k, v in x.items()}
            return tuple(self.layer(torch.cat([f(self, own), own["dense"], x["user_dense"]], 1)) for f in self.forms)

    model = ItemBags(*FORMS.values())
    inputs = {k: v for k, v in draw(ROWS, ROWS).items() if k.startswith("item") or k == "user_dense"}
    export(model, inputs, path)
    for mode in MODES:
        assert transform(path, out, mode)[0] == 0
        assert command("verify", path, out).returncode == 0


def test_requests_give_lists(tmp_path):
    model, path, out = Bags(FORMS["weights given"], FORMS["without the end"]), tmp_path / "m.pt2", tmp_path / "m.out.pt2"
    export(model, draw(ROWS, ROWS), path)
    assert transform(path, out)[0] == 0
    requests, expected = [], []
    for count in (3, 1, 2, 0):
        x = draw(1, count) if count else draw(1, 1)
        lists = lambda name, bounds: [x[name][a:b].tolist() for a, b in zip(bounds, bounds[1:])]  # noqa: E731
        ends = x["item_starts"].tolist() + [len(x["item_tags"])]
        candidates = {
            "item_values": lists("item_values", x["item_offsets"]), "item_weights": lists("item_weights", x["item_offsets"]),
            "item_tags": lists("item_tags", ends), "item_dense": x["item_dense"].tolist(),
        }  # fmt: skip
        if not count:
            candidates = {k: [] for k in candidates}
        user = {k: x[f"user_{k}"].tolist() for k in ("values", "weights", "tags")} | {"dense": x["user_dense"][0].tolist()}
        if len(requests) != 1:  # a user with values: those of side() begin with an empty bag
            user |= {"values": [3, 7], "weights": [0.5, -2.0], "tags": [1, 2, 4]}
        requests.append({"user": {f"user_{k}": v for k, v in user.items()}, "candidates": candidates})
        if not count:
            continue
        mine = {"user_" + k: torch.tensor(v, dtype=x["user_" + k].dtype) for k, v in user.items() if k != "dense"}
        mine |= {"user_offsets": torch.tensor([0, len(user["values"])]), "user_starts": torch.tensor([0], dtype=torch.int32)}
        with torch.no_grad():
            expected.append(model(select({**x, **mine}, [0] * count))[0])
    (tmp_path / "requests.json").write_text(json.dumps({"requests": requests}))
    result = command("score", out, "--requests", tmp_path / "requests.json", "--json")
    assert result.returncode == 0, result.stderr
    given = [r["scores"] for r in json.loads(result.stdout)["requests"]]
    assert given.pop() == []
    for g, e in zip(given, expected):
        torch.testing.assert_close(torch.tensor(g, dtype=torch.double), e, rtol=1e-9, atol=1e-9)
    verified = command("verify", path, out, "--requests", tmp_path / "requests.json")
    assert verified.returncode == 0, verified.stdout + verified.stderr

    def message(change):
        broken = json.loads(json.dumps(requests))
        change(broken[0])
        (tmp_path / "broken.json").write_text(json.dumps({"requests": broken}))
        result = command("score", out, "--requests", tmp_path / "broken.json")
        assert result.returncode == 2, result.stdout
        return result.stderr

    assert "user_weights" in message(lambda r: r["user"]["user_weights"].append(1.0)) and "belong together" in message(
        lambda r: r["user"]["user_weights"].append(1.0))
    assert "other lengths" in message(lambda r: r["candidates"]["item_weights"][0].append(1.0))
    assert "expected 2 lists, given 3" in message(lambda r: (r["candidates"]["item_values"].pop(), r["candidates"]["item_weights"].pop()))
    assert "is not given" in message(lambda r: r["user"].update(user_offsets=[0, 2]))
    assert "'user_values'[1] is 11" in message(lambda r: r["user"]["user_values"].__setitem__(1, VOCABULARY))


def joined(folder, path, inputs):
    """Runs an archive on inputs that are joined already."""
    return run(path, [write_inputs(folder / "joined", inputs)])


def test_offsets_of_joined_inputs_are_checked(tmp_path):
    model, path, out = Bags(FORMS["weights given"], FORMS["without the end"]), tmp_path / "m.pt2", tmp_path / "m.out.pt2"
    export(model, draw(ROWS, ROWS), path)
    assert transform(path, out)[0] == 0
    x, index = draw(3, ROWS), torch.tensor([2, 0, 1, 1, 0], dtype=torch.int32)

    def message(**changed):
        assert changed.keys() <= x.keys()
        result = joined(tmp_path, out, [*({**x, **changed}).values(), index])
        return "" if result.returncode == 0 else result.stderr

    assert message() == ""
    values = len(x["user_values"])
    x["user_offsets"] = torch.tensor([0, 1, 2, values])
    assert message() == ""
    assert message(user_offsets=torch.tensor([0, 1, 1, values - 1])) == "", "values behind the last bag are left out"
    assert "'user_offsets' begins with 1" in message(user_offsets=torch.tensor([1, 1, 2, values]))
    assert "'user_offsets' has 1 after 2 at position 2" in message(user_offsets=torch.tensor([0, 2, 1, values]))
    assert f"there are {values} values" in message(user_offsets=torch.tensor([0, 1, 2, values + 1]))
    assert "'user_starts' has -1 after 0" in message(user_starts=torch.tensor([0, -1, 0], dtype=torch.int32))
    assert "'item_offsets' has 0 after 1" in message(item_offsets=torch.tensor([0, 1, 0, 1, 1, 2]))


class ManyValues(nn.Module):
    """Several lists of one length each: an id and its kind, with their own sizes in the export."""

    def __init__(self):
        super().__init__()
        self.ids, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(3 * WIDTH, 1)

    def forward(self, x):
        def one(side, name):
            return F.embedding_bag(x[f"{side}_{name}"], self.ids.weight, x[f"{side}_offsets"], mode="mean", include_last_offset=True)

        items = one("item", "values") * one("item", "kinds") + x["item_dense"]
        return self.layer(torch.cat([one("user", "values"), one("user", "kinds"), items * x["user_dense"]], 1)).squeeze(1)


def many_values(users, candidates):
    x = {k: v for k, v in draw(users, candidates).items() if k.endswith(("values", "offsets", "dense"))}
    return x | {f"{side}_kinds": torch.randint(VOCABULARY, x[f"{side}_values"].shape) for side in ("user", "item")}


def test_several_values_of_the_same_bags(tmp_path):
    model, path, out = ManyValues(), tmp_path / "m.pt2", tmp_path / "m.out.pt2"
    kinds = {f"{side}_kinds": {0: torch.export.Dim(f"k_{side}")} for side in ("user", "item")}
    export(model, many_values(ROWS, ROWS), path, dynamic=kinds)
    for mode in MODES:
        code, text = transform(path, out, mode)
        assert code == 0, text
        module = torch.export.load(out).module()
        for users, index in MAPPINGS.values():
            x, index = many_values(users, len(index)), torch.tensor(index, dtype=torch.int32)
            bounds = x["user_offsets"]
            mine = [torch.arange(bounds[u], bounds[u + 1]) for u in index]
            copied = {k: x[k][torch.cat(mine)] for k in ("user_values", "user_kinds")} | {"user_dense": x["user_dense"][index]}
            copied["user_offsets"] = torch.tensor([0] + [len(m) for m in mine]).cumsum(0)
            with torch.no_grad():
                torch.testing.assert_close(module(x, index), model({**x, **copied}), rtol=1e-12, atol=1e-12)
        verified = command("verify", path, out)
        assert verified.returncode == 0, verified.stdout + verified.stderr
    spec = json.loads(command("spec", out, "--json").stdout)
    assert sorted(sorted(j["values"]) for j in spec["jagged"]) == [[f"x_{side}_kinds", f"x_{side}_values"] for side in ("item", "user")]
    x = many_values(3, 4)
    x["item_kinds"] = x["item_kinds"][1:]
    result = joined(tmp_path, out, [*x.values(), torch.tensor([0, 1, 2, 0], dtype=torch.int32)])
    assert result.returncode == 2 and "and they are of the same bags ('item_offsets')" in result.stderr
    requests = [{"user": {"user_values": [1, 2], "user_kinds": [3], "user_dense": [0.0] * WIDTH},
                 "candidates": {"item_values": [[1]], "item_kinds": [[2]], "item_dense": [[0.0] * WIDTH]}}]  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps({"requests": requests}))
    result = command("score", out, "--requests", tmp_path / "r.json")
    assert result.returncode == 2 and "they belong together" in result.stderr
    requests[0]["user"]["user_kinds"] = [3, 4]
    (tmp_path / "r.json").write_text(json.dumps({"requests": requests}))
    assert command("score", out, "--requests", tmp_path / "r.json").returncode == 0


def test_bags_that_nothing_reads(tmp_path):
    class Unread(Bags):
        def forward(self, x):
            return self.layer(torch.cat([x["user_dense"], x["item_dense"], x["user_dense"] * x["item_dense"]], 1))

    model, path, out = Unread(), tmp_path / "m.pt2", tmp_path / "m.out.pt2"

    def inputs(users, candidates):
        return {k: v for k, v in draw(users, candidates).items() if not k.endswith(("tags", "starts", "weights"))}

    export(model, inputs(ROWS, ROWS), path)
    for request_only in ("user_*", "user_dense"):
        for mode in MODES:
            code, text = transform(path, out, mode, request_only)
            assert code == 0, text
            module = torch.export.load(out).module()
            x, index = inputs(3, 4), torch.tensor([2, 0, 0, 1], dtype=torch.int32)
            x["user_offsets"] = x["user_offsets"] if request_only == "user_*" else x["item_offsets"]
            with torch.no_grad():
                expected = model({**x, "user_dense": x["user_dense"][index]})
                torch.testing.assert_close(module(x, index), expected, rtol=1e-12, atol=1e-12)
            ran = joined(tmp_path, out, [*x.values(), index])
            assert ran.returncode == 0, ran.stderr
            verified = command("verify", path, out)
            assert verified.returncode == 0, verified.stdout + verified.stderr
        lists = {"user_values": [3, 4, 5], "item_values": [1, 2]}
        request = {"user": {"user_dense": x["user_dense"][0].tolist()}, "candidates": {"item_dense": x["item_dense"].tolist()}, "shared": lists}
        (tmp_path / "r.json").write_text(json.dumps({"requests": [request]}))
        scored = command("score", out, "--requests", tmp_path / "r.json", "--json")
        assert scored.returncode == 0, scored.stderr
        with torch.no_grad():
            expected = model({**x, "user_dense": x["user_dense"][[0] * 4]})
        torch.testing.assert_close(torch.tensor(json.loads(scored.stdout)["requests"][0]["scores"], dtype=torch.double), expected)


REFUSED = {
    "values across bags": lambda m, x: bag(m, {**x, "values": x["values"].flip(0)}),
    "values added up": lambda m, x: bag(m, x) * x["values"].sum(),
    "values counted": lambda m, x: bag(m, x) / x["values"].shape[0],
    "offsets as numbers": lambda m, x: bag(m, x) + x["offsets"][1:].unsqueeze(1),
    "weights over all values": lambda m, x: bag(m, x, per_sample_weights=x["weights"].softmax(0)),
    "noise": lambda m, x: bag(m, x, per_sample_weights=x["weights"] + torch.rand_like(x["weights"])),
    "a table of the rows": lambda m, x: F.embedding_bag(x["values"] % 2, x["dense"], x["offsets"], include_last_offset=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_bags_is_refused(tmp_path, name):
    text = refusal(tmp_path, REFUSED[name])
    assert "bags of many lengths" in text and "pad the bags to a matrix" in text and "node '" in text


def test_values_and_offsets_go_together(tmp_path):
    text = refusal(tmp_path, FORMS["sum"], request_only="user_values,user_weights,user_dense")
    assert "mark both --request-only, or none" in text
    text = refusal(tmp_path, lambda m, x: F.embedding_bag(x["values"], m.ids.weight, x["offsets"].cumsum(0) * 0, include_last_offset=True))
    assert "computed in the model" in text


def test_values_that_are_an_output_are_refused(tmp_path):
    class Shown(Bags):
        def forward(self, x):
            return (*super().forward(x), x["user_values"] + 1)

    export(Shown(FORMS["sum"]), draw(ROWS, ROWS), tmp_path / "m.pt2")
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2")
    assert code == 2 and "without a row for each candidate" in text
