"""Models that spread request-only rows over their candidates by themselves (CASES 21): a batch of 1 that is expanded, tiled or
broadcast, and rows looked up by an index that the model takes. The original is called once a user, the result once."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikbo  # noqa: F401 - torch.export.load needs the operators
from transform_checks import MODES, command, roles

LENGTH, WIDTH, ROWS = 5, 4, 8
MAPPINGS = {
    "even": (3, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    "uneven": (4, [0, 0, 0, 0, 1, 3, 3]),
    "unsorted": (4, [3, 0, 1, 3, 0, 0, 3, 1, 1]),
    "one user": (1, [0, 0, 0]),
    "equal batches": (4, [2, 0, 3, 1]),
}


class Inside(nn.Module):
    """Every form is one output."""

    def __init__(self, *forms):
        super().__init__()
        self.forms = forms
        self.ids = nn.Embedding(11, WIDTH)
        self.linear = nn.Linear(2 * WIDTH, 3)
        self.small = nn.Linear(WIDTH, WIDTH)
        self.unit = nn.Linear(4 * WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.bag = nn.EmbeddingBag(11, WIDTH, mode="mean")
        self.register_buffer("upper", torch.ones(3, 3).triu(1).bool())
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return tuple(form(self, x) for form in self.forms)


def example(users=1):
    return {
        "user_dense": torch.randn(users, WIDTH),
        "user_id": torch.randint(11, (users,)),
        "user_seq": torch.randn(users, LENGTH, WIDTH),
        "user_items": torch.randint(11, (users, LENGTH)),
        "item_dense": torch.randn(ROWS, WIDTH),
        "item_id": torch.randint(11, (ROWS,)),
        "item_fields": torch.randn(ROWS, 3, WIDTH),
    }


def export(model, inputs, path, decompose, users=None):
    batch = torch.export.Dim("batch", min=2, max=500)
    dynamic = {k: {0: batch} if not k.startswith("user_") else {0: users} if users else {} for k in inputs}
    exported = torch.export.export(model, (inputs,), dynamic_shapes=(dynamic,), strict=False)
    torch.export.save(exported.run_decompositions({}) if decompose else exported, path)


def verified_in_float32(model, inputs, tmp_path, decompose, *more, users=None):
    single = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    export(model.float(), single, tmp_path / "single.pt2", decompose, users)
    code, text = transform(tmp_path / "single.pt2", tmp_path / "single.out.pt2", "ikbo", *more)
    assert code == 0, text
    result = command("verify", tmp_path / "single.pt2", tmp_path / "single.out.pt2")
    assert result.returncode == 0, result.stdout + result.stderr


def sides(path):
    return {i["name"]: i["side"] for i in json.loads(command("spec", path, "--json").stdout)["inputs"]}


def double(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def transform(path, out, mode="ikbo", *more):
    result = command("transform", path, "--request-only", "user_*", "-o", out, "--mode", mode, "--json", "--report", *more)
    return result.returncode, result.stdout + result.stderr


def rows(users, candidates):
    fresh = {**example(users), **{k: v for k, v in example().items() if k.startswith("item_")}}
    pick = torch.randint(ROWS, (candidates,))
    return {k: v if k.startswith("user_") else v[pick] for k, v in fresh.items()}


def once_a_user(model, x, index):
    """What the original gives for every user and that user's candidates, put together."""
    scores = None
    for user in sorted(set(index.tolist())):
        mine = (index == user).nonzero().squeeze(1)
        parts = model({k: v[user : user + 1] if k.startswith("user_") else v[mine] for k, v in x.items()})
        if scores is None:
            scores = [torch.zeros(len(index), *p.shape[1:], dtype=p.dtype) for p in parts]
        for score, part in zip(scores, parts):
            score[mine] = part.reshape(score[mine].shape)  # a model that squeezes gives one score without its batch
    return scores


def compare(forms, given, expected, where):
    for name, g, e in zip(forms, given, expected):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}, {where}: {m}")


def batch(x):
    return x["item_dense"].shape[0]


def unit(m, q, k):
    """DIN's attention unit over the history of one user."""
    q = q.unsqueeze(1).expand(-1, LENGTH, -1)
    k = k.expand(q.shape[0], -1, -1)
    return (m.unit(torch.cat([q, k, q - k, q * k], -1)) * k).sum((1, 2))


def spread(x):
    return x["user_dense"].expand(batch(x), -1)


FORMS = {
    "expand": lambda m, x: m.linear(torch.cat([spread(x), x["item_dense"]], 1)),
    "expand_as": lambda m, x: m.linear(torch.cat([x["user_dense"].expand_as(x["item_dense"]), x["item_dense"]], -1)),
    "repeat": lambda m, x: m.linear(torch.cat([x["user_dense"].repeat(batch(x), 1), x["item_dense"]], 1)),
    "tile": lambda m, x: m.linear(torch.cat([torch.tile(x["user_dense"], (batch(x), 1)), x["item_dense"]], 1)),
    "tile of one dimension": lambda m, x: (m.ids(x["user_id"]).squeeze(0).repeat(batch(x), 1) * x["item_dense"]).sum(1),
    "repeat_interleave": lambda m, x: (x["user_dense"].repeat_interleave(batch(x), dim=0) * x["item_dense"]).sum(1),
    "broadcast_to": lambda m, x: (torch.broadcast_to(m.small(x["user_dense"]), x["item_dense"].shape) * x["item_dense"]).sum(1),
    "pointwise": lambda m, x: (torch.relu(m.small(x["user_dense"])) * x["item_dense"] - m.ids(x["user_id"])).sum(1),
    "a vector": lambda m, x: (m.small(x["user_dense"]).squeeze(0) * x["item_dense"]).sum(1),
    "the first row": lambda m, x: (m.small(x["user_dense"])[0] * x["item_dense"]).sum(1),
    "another rank": lambda m, x: (m.small(x["user_dense"]).unsqueeze(0) + x["item_fields"]).sum((1, 2)),
    "a history": lambda m, x: (m.ids(x["user_items"]).mean(1) * m.ids(x["item_id"])).sum(1),
    "a history of no batch": lambda m, x: (m.ids(x["user_items"][0]).mean(0) * m.ids(x["item_id"])).sum(1),
    "attention unit": lambda m, x: unit(m, x["item_dense"], x["user_seq"]),
    "tiled along an axis": lambda m, x: m.linear(
        torch.cat([x["user_dense"].unsqueeze(1).repeat(batch(x), 3, 1), x["item_fields"]], -1)
    ).amax((1, 2)),
    "expanded along an axis": lambda m, x: m.linear(
        torch.cat([m.small(x["user_dense"]).unsqueeze(1).expand(batch(x), 3, -1), x["item_fields"]], -1)
    ).amax((1, 2)),
    "matrix times vector": lambda m, x: x["item_dense"] @ m.small(x["user_dense"])[0],
    "matrix times column": lambda m, x: (x["item_dense"] @ m.small(x["user_dense"]).t()).squeeze(1),
    "row times matrix": lambda m, x: (m.small(x["user_dense"]) @ x["item_dense"].t()).squeeze(0),
    "linear with a request's weight": lambda m, x: F.linear(x["item_dense"], x["user_seq"][0]),
    "attention of rows": lambda m, x: (
        torch.softmax(x["item_dense"] @ x["user_seq"][0].t() / 2, -1) @ m.small(x["user_seq"][0])
    ).sum(1),
    "attention of one sequence": lambda m, x: F.scaled_dot_product_attention(
        x["item_fields"].unsqueeze(1), x["user_seq"].expand(batch(x), -1, -1).unsqueeze(1),
        m.small(x["user_seq"]).expand(batch(x), -1, -1).unsqueeze(1)).sum((1, 2, 3)),
    "scores of the history": lambda m, x: (
        (torch.softmax(m.small(x["user_seq"][0]).sum(1), 0).unsqueeze(1) * x["user_seq"][0]).sum(0) * x["item_dense"]
    ).sum(1),
    "self attention of the history": lambda m, x: (
        m.attention(x["user_seq"], x["user_seq"], x["user_seq"])[0].sum(1) * x["item_dense"]
    ).sum(1),
    "batch norm": lambda m, x: (m.norm(m.small(x["user_dense"])) + m.norm(x["item_dense"])).sum(1),
    "a mask": lambda m, x: torch.where(x["user_dense"] > 0, x["item_dense"], x["user_dense"]).masked_fill(
        x["item_dense"] > 1, 0.5).sum(1),
    "stacked fields": lambda m, x: torch.stack([spread(x), m.ids(x["user_id"]).expand(batch(x), -1), x["item_dense"]], 1).prod(1).sum(1),
    "flattened": lambda m, x: (x["user_seq"].reshape(1, -1) * x["item_fields"].flatten(1)[:, :1]).mean(1),
    "einsum over one row": lambda m, x: torch.einsum("bd,bd->b", x["item_dense"], m.small(x["user_dense"])),
    "einsum over the only row": lambda m, x: torch.einsum("bd,cd->bc", x["item_dense"], m.small(x["user_dense"])).squeeze(1),
    "einsum over a history": lambda m, x: torch.einsum("bd,ld->bl", x["item_dense"], m.small(x["user_seq"][0])).sigmoid().sum(1),
    "einsum of one sequence": lambda m, x: torch.einsum("bfd,bld->blf", x["item_fields"], x["user_seq"]).amax(1).sum(1),
    "einsum of the request alone": lambda m, x: (
        x["item_dense"] * torch.einsum("ld,le->de", x["user_seq"][0], m.small(x["user_seq"][0]))[1]
    ).sum(1),
    "einsum to a number": lambda m, x: x["item_dense"].sum(1) * torch.einsum("ld,ld->", x["user_seq"][0], m.small(x["user_seq"][0])),
    "einsum with dots": lambda m, x: (
        torch.einsum("...k,ok->...o", x["item_dense"], m.small.weight) * torch.einsum("...k,ok->...o", x["user_dense"], m.small.weight)
    ).sum(1),
    "einsum with dots over the only row": lambda m, x: torch.einsum("...d,bd->b...", x["user_dense"], x["item_dense"]).squeeze(1),
    "einsum with dots for a history": lambda m, x: torch.einsum("...ld,bd->...lb", x["user_seq"], x["item_dense"])[0].amax(0),
    "einsum with dots of several lengths": lambda m, x: torch.einsum("...d,...d->...", x["item_fields"], x["user_dense"]).sum(1),
    "bmm with the only matrix": lambda m, x: torch.bmm(x["item_dense"].unsqueeze(0), x["user_seq"].transpose(1, 2))[0].amax(1),
    "attention over a batch of one": lambda m, x: F.scaled_dot_product_attention(
        x["item_fields"].unsqueeze(1), x["user_seq"].unsqueeze(1), m.small(x["user_seq"]).unsqueeze(1)).sum((1, 2, 3)),
    "attention of the only query": lambda m, x: F.scaled_dot_product_attention(
        x["user_dense"].view(1, 1, 1, WIDTH), x["item_fields"].unsqueeze(1), x["item_fields"].unsqueeze(1)).sum((1, 2, 3)),
    "attention with a mask of the request": lambda m, x: F.scaled_dot_product_attention(
        x["item_fields"].unsqueeze(1), x["user_seq"].unsqueeze(1), x["user_seq"].unsqueeze(1),
        attn_mask=(x["user_items"] > -1).view(1, 1, 1, LENGTH)).sum((1, 2, 3)),
    "one number of the request": lambda m, x: x["user_seq"].sum() * x["item_dense"].sum(1),
    "numbers of the request": lambda m, x: (
        x["item_fields"] * torch.sigmoid(x["user_seq"].mean()) + x["user_dense"].max() - x["user_dense"][0, 1] * x["user_dense"].min()
    ).sum((1, 2)),
    "an id without a batch": lambda m, x: (m.ids(x["user_id"].squeeze()) * x["item_dense"]).sum(1) + m.ids(x["user_id"][0])[2],
    "a number spread": lambda m, x: x["user_dense"].sum().expand(batch(x)) * x["item_dense"].sum(1),
    "numbers stacked": lambda m, x: (
        torch.stack([x["user_dense"].sum(), x["user_seq"].mean(), x["user_dense"][0, 2], x["user_id"][0] * 1.0]) * x["item_dense"]
    ).sum(1),
    "pairs by a mask": lambda m, x: torch.masked_select(x["item_fields"] @ x["item_fields"].mT * x["user_dense"][0, 0], m.upper).view(-1, 3).sum(1),
    "bags of one length": lambda m, x: (
        m.bag(x["user_items"]) * x["item_dense"] * m.bag(torch.stack([x["item_id"], x["item_id"] * 2 % 11], 1))
    ).sum(1),
    "in place": lambda m, x: m.small(x["item_dense"]).mul_(x["user_dense"]).relu_().sum(1),
    "squeezed": lambda m, x: m.unit(torch.cat([spread(x), spread(x), x["item_dense"], x["item_dense"]], 1)).squeeze(),
}
REFUSED = {
    "einsum of candidates with each other": lambda m, x: torch.einsum("bd,cd->bc", x["item_dense"], x["item_dense"] * x["user_dense"])[:, :1],
    "einsum over the candidates": lambda m, x: torch.einsum("bd,bd->d", x["item_dense"], x["user_dense"]) * x["item_dense"],
    "einsum with dots that sums over candidates": lambda m, x: torch.einsum("...d,...d->d", x["item_dense"], x["user_dense"]) * x["item_dense"],
    "attention between candidates": lambda m, x: F.scaled_dot_product_attention(
        x["item_dense"].unsqueeze(0), x["item_dense"].unsqueeze(0) * x["user_dense"], x["item_dense"].unsqueeze(0)).squeeze(0),
    "a number shown": lambda m, x: x["user_seq"].sum(),
    "softmax over the candidates": lambda m, x: (x["item_dense"] * x["user_dense"]).softmax(0).sum(1),
    "mean of the candidates": lambda m, x: (x["item_dense"] - x["item_dense"].mean(0) * x["user_dense"]).sum(1),
    "number of candidates": lambda m, x: (x["item_dense"] * x["user_dense"]).sum(1) / batch(x),
    "statistics": lambda m, x: F.batch_norm(x["item_dense"] * x["user_dense"], None, None, training=True).sum(1),
    "noise": lambda m, x: (x["item_dense"] * x["user_dense"] + torch.rand_like(x["item_dense"])).sum(1),
    "candidates reversed": lambda m, x: (x["item_dense"].flip(0) * x["user_dense"]).sum(1),
    "gathered by the first row": lambda m, x: torch.gather(x["item_dense"], 1, x["user_items"] % WIDTH).sum() * 0
    + torch.gather(x["item_dense"], 1, x["user_items"] % WIDTH).sum(1) * x["item_dense"].sum(1),
    "the user beside the candidates": lambda m, x: torch.cat([x["user_dense"], x["item_dense"]])[1:].cumsum(0).sum(1),
    "candidates against each other": lambda m, x: (x["item_dense"] @ x["item_dense"].t()).sum(1) * x["user_dense"].sum(1),
    "a request-only output": lambda m, x: m.small(x["user_dense"]),
    "scattered from one row": lambda m, x: torch.scatter(x["item_dense"], 0, x["user_items"][:, :WIDTH] % 2, 0.0).sum(1),
}


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
def test_a_batch_of_one_is_spread_by_the_transform_instead(tmp_path, decompose):
    model, inputs = Inside(*FORMS.values()).double().eval(), double(example())
    export(model, inputs, tmp_path / "m.pt2", decompose)
    for mode in MODES:
        code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", mode)
        assert code == 0, text
        module = torch.export.load(tmp_path / "m.out.pt2").module()
        for mapping, (users, index) in MAPPINGS.items():
            x, index = double(rows(users, len(index))), torch.tensor(index, dtype=torch.int32)
            with torch.no_grad():
                compare(FORMS, module(x, index), once_a_user(model, x, index), f"{mode}, {mapping}")
        assert sides(tmp_path / "m.out.pt2")["user_dense"] == "request-only"
    verified_in_float32(model, inputs, tmp_path, decompose)


def test_bags_of_many_lengths_are_refused(tmp_path):
    inputs = {k: v for k, v in example().items() if k in ("user_dense", "item_dense")}
    inputs |= {"item_values": torch.randint(11, (9,)), "item_offsets": torch.arange(ROWS)}
    forms = [lambda m, x: F.embedding_bag(x["item_values"], m.ids.weight, x["item_offsets"]).sum(1) * (x["item_dense"] * x["user_dense"]).sum(1)]
    batch, values = torch.export.Dim("batch", min=2, max=500), torch.export.Dim("values")
    dynamic = {"user_dense": {}, "item_dense": {0: batch}, "item_values": {0: values}, "item_offsets": {0: batch}}
    torch.export.save(torch.export.export(Inside(*forms).eval(), (inputs,), dynamic_shapes=(dynamic,), strict=False), tmp_path / "m.pt2")
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2")
    assert code == 2 and "item_offsets" in text and "pad the bags to a matrix" in text, text


@pytest.mark.parametrize("name", ["expand", "expand_as", "repeat", "tile"])
def test_the_spread_is_sunk_as_in_the_general_form(tmp_path, name):
    export(Inside(FORMS[name]).eval(), example(), tmp_path / "m.pt2", True)
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2")
    assert code == 0, text
    kinds = [o["role"] for o in roles(tmp_path / "m.out.pt2").values()]
    assert "ikbo" in kinds and "broadcast" not in kinds, kinds


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_candidates_of_one_request_is_refused(tmp_path, name):
    export(Inside(REFUSED[name]).eval(), example(), tmp_path / "m.pt2", True)
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2")
    assert code == 2 and text.startswith("ikbo: "), text
    assert "batch of 1" in text or "one row a candidate" in text, text


# ---- Rows that the model looks up by an index of its own -----------------------------------------------------------------

LOOKED_UP = {
    "x[index]": lambda m, x: m.linear(torch.cat([x["user_dense"][x["owner"]], x["item_dense"]], 1)),
    "index_select": lambda m, x: (m.small(x["user_dense"]).index_select(0, x["owner"]) * x["item_dense"]).sum(1),
    "embedding": lambda m, x: (F.embedding(x["owner"], m.small(x["user_dense"])) * m.ids(x["item_id"])).sum(1),
    "ids": lambda m, x: (m.ids(x["user_id"][x["owner"].long()]) * x["item_dense"]).sum(1),
    "another axis": lambda m, x: (x["user_seq"].transpose(0, 1)[:, x["owner"]].sum(0) * x["item_dense"]).sum(1),
    "attention unit": lambda m, x: unit(m, x["item_dense"], m.ids(x["user_items"]).index_select(0, x["owner"].view(-1))),
    "attention": lambda m, x: F.scaled_dot_product_attention(
        x["item_fields"].unsqueeze(1), x["user_seq"][x["owner"]].unsqueeze(1), m.small(x["user_seq"])[x["owner"]].unsqueeze(1)
    ).sum((1, 2, 3)),
    "pairs by a mask": lambda m, x: torch.masked_select(
        x["item_fields"] @ x["item_fields"].mT * x["user_dense"][x["owner"]].sum(1).view(-1, 1, 1), m.upper).view(-1, 3).sum(1),
    "zeros": lambda m, x: ((x["user_dense"] + torch.zeros_like(x["user_dense"]))[x["owner"]] * x["item_dense"]).sum(1),
}
NOT_LOOKED_UP = {
    "the index as a feature": lambda m, x: m.ids(x["owner"] % 3).sum(1) * x["user_dense"][x["owner"]].sum(1),
    "users against each other": lambda m, x: (x["user_dense"] - x["user_dense"].mean(0))[x["owner"]].sum(1) * x["item_dense"].sum(1),
    "number of users": lambda m, x: (x["user_dense"] / x["user_dense"].shape[0])[x["owner"]].sum(1) * x["item_dense"].sum(1),
    "candidates looked up": lambda m, x: x["item_dense"][x["owner"]].sum(1) * x["user_dense"][x["owner"]].sum(1),
    "an output of users": lambda m, x: m.small(x["user_dense"]),
    "every user with every candidate": lambda m, x: (x["item_dense"] @ x["user_dense"].t()).gather(1, x["owner"].unsqueeze(1)),
    "part of the history": lambda m, x: x["user_seq"].flatten(0, 1)[x["owner"]].sum(1) * x["item_dense"].sum(1),
}


def looked_up_example(dtype=torch.int64):
    return {**example(3), "owner": torch.randint(3, (ROWS,), dtype=dtype)}


@pytest.mark.parametrize("decompose", [False, True], ids=["raw", "decomposed"])
def test_rows_that_the_model_looks_up_itself(tmp_path, decompose):
    users = torch.export.Dim("users", min=1, max=100)
    model, inputs = Inside(*LOOKED_UP.values()).double().eval(), double(looked_up_example())
    export(model, inputs, tmp_path / "m.pt2", decompose, users)
    for mode in MODES:
        code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", mode, "--index", "owner")
        assert code == 0, text
        module = torch.export.load(tmp_path / "m.out.pt2").module()
        for mapping, (users_here, index) in MAPPINGS.items():
            x = double(rows(users_here, len(index))) | {"owner": torch.tensor(index)}
            with torch.no_grad():  # the same call, since the model takes an index already
                compare(LOOKED_UP, module(x), model(x), f"{mode}, {mapping}")
        given = sides(tmp_path / "m.out.pt2")
        assert given["owner"] == "index" and given["user_dense"] == "request-only" and len(given) == len(inputs)
    verified_in_float32(model, inputs, tmp_path, decompose, "--index", "owner", users=users)


@pytest.mark.parametrize("name", NOT_LOOKED_UP)
def test_what_reads_users_otherwise_is_refused(tmp_path, name):
    users = torch.export.Dim("users", min=1, max=100)
    export(Inside(NOT_LOOKED_UP[name]).eval(), looked_up_example(), tmp_path / "m.pt2", True, users)
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", "ikbo", "--index", "owner")
    assert code == 2 and text.startswith("ikbo: "), text
    assert "by an index" in text or "one row a candidate" in text, text


def test_an_index_that_is_none(tmp_path):
    users = torch.export.Dim("users", min=1, max=100)
    model = Inside(LOOKED_UP["x[index]"]).eval()
    export(model, looked_up_example(), tmp_path / "m.pt2", True, users)
    for name, message in {"item_dense": "must be a vector", "owners": "matches no input", "user_id": "not request-only"}.items():
        code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", "ikbo", "--index", name)
        assert code == 2 and message in text, text
    result = command("transform", tmp_path / "m.pt2", "--request-only", "user_dense", "--index", "owner", "-o", tmp_path / "o.pt2")
    assert result.returncode == 2 and "is not marked request-only" in result.stderr
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2")
    assert code == 0 and "--index" in json.loads(text)["warnings"][0], "without it the batches are taken as one"
    export(Inside(FORMS["expand"]).eval(), {**example(), "owner": torch.zeros(ROWS, dtype=torch.int64)}, tmp_path / "o.pt2", True)
    code, text = transform(tmp_path / "o.pt2", tmp_path / "m.out.pt2", "ikbo", "--index", "owner")
    assert code == 2 and "dynamic batch" in text, text


def test_an_index_of_int32(tmp_path):
    users = torch.export.Dim("users", min=1, max=100)
    model, inputs = Inside(LOOKED_UP["index_select"]).eval(), looked_up_example(torch.int32)
    export(model, inputs, tmp_path / "m.pt2", True, users)
    code, text = transform(tmp_path / "m.pt2", tmp_path / "m.out.pt2", "ikbo", "--index", "owner")
    assert code == 0, text
    assert command("verify", tmp_path / "m.pt2", tmp_path / "m.out.pt2").returncode == 0
