"""Linear compression and target attention in the forms that models write them: which become an operator of ikbo, which
must not, and that all of them mean the same afterwards. Each form is one output of one model."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from transform_checks import check, command, draw, export, replicate, roles, transform

K_USER, K_ITEM, WIDTH, ROWS = 5, 3, 4, 6  # K_USER + K_ITEM and ROWS are no multiples of 8
LENGTH, HEADS, DIM, SEEDS = 7, 2, 4, 3
NEG_INF = float("-inf")


class Forms(nn.Module):
    def __init__(self, forms):
        super().__init__()
        self.forms = forms
        self.weight = nn.Parameter(torch.randn(ROWS, K_USER + K_ITEM))
        self.linear = nn.Linear(K_USER + K_ITEM, ROWS)
        self.conv = nn.Conv1d(K_USER + K_ITEM, ROWS, 1)
        self.norm = nn.LayerNorm(WIDTH)
        self.hyper = nn.Linear(WIDTH, ROWS * (K_USER + K_ITEM))
        self.along_rows = nn.Linear(WIDTH, 3)
        self.attention = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True)
        self.register_buffer("positions", torch.arange(LENGTH))

    def forward(self, x):
        return tuple(form(self, x) for form in self.forms.values())


def examples(rows=8):
    lengths = torch.tensor([0, 3, LENGTH, 0, 1, 5, 0, LENGTH])[:rows]
    present = torch.arange(LENGTH) < lengths.unsqueeze(1)
    return {
        "user_rows": torch.randn(rows, K_USER, WIDTH),
        "user_row": torch.randn(rows, WIDTH),
        "user_k": torch.randn(rows, LENGTH, HEADS * DIM),
        "user_v": torch.randn(rows, LENGTH, HEADS * DIM),
        "user_length": lengths,
        "user_items": torch.randint(1, 9, (rows, LENGTH)).where(present, 0),
        "user_left": torch.randint(1, 9, (rows, LENGTH)).where(present, 0).flip(1),
        "item_rows": torch.randn(rows, K_ITEM, WIDTH),
        "item_row": torch.randn(rows, WIDTH),
        "item_q": torch.randn(rows, SEEDS, HEADS * DIM),
        "item_id": torch.randint(1, 9, (rows,)),
    }


def used(names, example):
    return {k: v for k, v in example.items() if k.startswith(names)}


def check_forms(forms, example, tmp_path):
    """In float64, so that a wrong rewrite shows and rounding does not; in float32, `verify` says whether it is as exact
    as the original. Returns the targets of all operators and the report."""
    model = Forms(forms).double().eval()
    example = {k: v.double() if v.is_floating_point() else v for k, v in example.items()}
    export(model, example, tmp_path / "m.pt2")
    report = transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    module = torch.export.load(tmp_path / "m.ikbo.pt2").module()
    for users, candidates in ((4, 9), (5, 5), (1, 3), (6, 2), (8, 1)):  # uneven, unsorted, users without candidates
        rows = draw(example, users, candidates)
        if "user_length" in rows:
            rows["user_length"][0] = 0
        index = torch.randint(users, (candidates,), dtype=torch.int32)
        with torch.no_grad():
            for name, given, expected in zip(forms, module(rows, index), model(replicate(rows, index))):
                torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{name}: {m}")
    single = {k: v.float() if v.is_floating_point() else v for k, v in example.items()}
    export(model.float(), single, tmp_path / "single.pt2")
    transform(tmp_path / "single.pt2", tmp_path / "single.ikbo.pt2")
    result = command("verify", tmp_path / "single.pt2", tmp_path / "single.ikbo.pt2")
    assert result.returncode == 0, result.stdout + result.stderr
    return [o["target"] for o in roles(tmp_path / "m.ikbo.pt2").values()], report


def count(targets, name):
    return sum(target == f"torch.ops.ikbo.{name}.default" for target in targets)


# ---- Linear compression ---------------------------------------------------------------------------------------------


def stack(x):
    return torch.cat([x["user_rows"], x["item_rows"]], dim=1)


def fields(x):
    """Embeddings stacked one by one, sides mixed, one of them a sum of both."""
    user, item = x["user_rows"].unbind(1), x["item_rows"].unbind(1)
    return torch.stack([item[0], *user[:2], item[1], user[2], x["user_row"], x["item_row"] - x["user_row"], user[2]], dim=1)


COMPRESSIONS = {
    "matmul": lambda m, x: m.weight @ stack(x),
    "weight with a batch of one": lambda m, x: torch.matmul(m.weight.unsqueeze(0), stack(x)),
    "expanded weight": lambda m, x: torch.bmm(m.weight.expand(x["item_rows"].shape[0], -1, -1), stack(x)),
    "repeated weight": lambda m, x: m.weight.repeat(x["item_rows"].shape[0], 1, 1) @ stack(x),
    "einsum": lambda m, x: torch.einsum("mk,bkn->bmn", m.weight, stack(x)),
    "einsum, moved": lambda m, x: torch.einsum("b k n, m k -> b n m", stack(x), m.weight),
    "linear on the transposed": lambda m, x: m.linear(stack(x).transpose(1, 2)).transpose(1, 2),
    "linear on the permuted": lambda m, x: m.linear(stack(x).permute(0, 2, 1).contiguous()),
    "matmul on the transposed": lambda m, x: stack(x).mT @ m.weight.t(),
    "convolution of width 1": lambda m, x: m.conv(stack(x)),
    "candidates first": lambda m, x: m.weight @ torch.cat([x["item_rows"], x["user_rows"]], 1),
    "interleaved": lambda m, x: m.weight
    @ torch.cat([x["user_rows"][:, :2], x["item_rows"][:, 1:], x["user_rows"][:, 2:], x["item_rows"][:, :1]], -2),
    "stack of fields": lambda m, x: m.weight @ fields(x),
    "after a pointwise operator": lambda m, x: m.weight @ torch.relu(stack(x)),
    "after a layer norm and a linear layer": lambda m, x: m.weight @ m.along_rows(m.norm(stack(x))),
    "a parameter among the rows": lambda m, x: m.weight
    @ torch.cat([x["user_rows"][:, 1:], m.weight[:1, :WIDTH].expand(x["item_row"].shape[0], 1, -1), x["item_rows"]], 1),
}


def test_linear_compression(tmp_path):
    targets, report = check_forms(COMPRESSIONS, used(("user_row", "item_row"), examples()), tmp_path)
    assert count(targets, "linear_compression") == len(COMPRESSIONS), targets
    assert not report["stops"], report


def test_weights_keep_aligned_rows_through_save_and_load(tmp_path):
    forms = {name: COMPRESSIONS[name] for name in ("matmul", "linear on the transposed")}
    example = used(("user_row", "item_row"), examples())
    model = Forms(forms).eval()
    export(model, example, tmp_path / "m.pt2")
    transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    loaded = torch.export.load(tmp_path / "m.ikbo.pt2")
    torch.export.save(loaded, tmp_path / "again.pt2")
    for program in (loaded, torch.export.load(tmp_path / "again.pt2")):
        weights = {k: v for k, v in program.state_dict.items() if "ikbo" in k}
        assert sorted(tuple(w.shape) for w in weights.values()) == [(ROWS, 3), (ROWS, 3), (ROWS, 5), (ROWS, 6)]  # 6: bias
        assert all(w.stride() == (8, 1) for w in weights.values()), {k: w.stride() for k, w in weights.items()}
        rows, index = draw(example, 3, 7), torch.randint(3, (7,), dtype=torch.int32)
        with torch.no_grad():
            for given, expected in zip(program.module()(rows, index), model(replicate(rows, index))):
                torch.testing.assert_close(given, expected)


NO_COMPRESSIONS = {
    "weight of the user": lambda m, x: m.hyper(x["user_row"]).view(-1, ROWS, K_USER + K_ITEM) @ stack(x),
    "weight of the candidate": lambda m, x: m.hyper(x["item_row"]).view(-1, ROWS, K_USER + K_ITEM) @ stack(x),
    "along the embedding": lambda m, x: m.along_rows(stack(x)),
    "two batches in one": lambda m, x: m.weight @ torch.cat([stack(x), stack(x)], 0).view(2, -1, K_USER + K_ITEM, WIDTH)[1],
    "request-only": lambda m, x: m.weight[:, :K_USER] @ x["user_rows"] + x["item_row"].unsqueeze(1),
}


def test_what_is_no_linear_compression(tmp_path):
    targets, _ = check_forms(NO_COMPRESSIONS, used(("user_row", "item_row"), examples()), tmp_path)
    assert count(targets, "linear_compression") == 0, targets


# ---- Target attention -----------------------------------------------------------------------------------------------


def heads(t, n=HEADS):
    return t.unflatten(2, (n, -1)).transpose(1, 2)


def attend(x, mask=None, key="user_k", value="user_v", **options):
    return F.scaled_dot_product_attention(heads(x["item_q"]), heads(x[key]), heads(x[value]), attn_mask=mask, **options)


def valid(x):
    return torch.arange(LENGTH) < x["user_length"].unsqueeze(1)


def keys(mask):
    return mask[:, None, None, :]


def added(padding, x):
    return torch.zeros_like(padding, dtype=x["item_q"].dtype).masked_fill(padding, NEG_INF)


def module_attention(m, x, padding=None):
    return m.attention(x["item_q"], x["user_k"], x["user_v"], key_padding_mask=padding, need_weights=False)[0]


def written_out(x, scale):
    weights = (heads(x["item_q"]) @ heads(x["user_k"]).transpose(-2, -1) * scale).softmax(-1)
    return (weights @ heads(x["user_v"])).transpose(1, 2).flatten(2)


def flat_heads(t):
    """(B, S, H * D) -> (B * H, S, D), as older models have it"""
    return heads(t).flatten(0, 1)


PREFIX_MASKS = {
    "positions < lengths": lambda m, x: attend(x, keys(valid(x))),
    "lengths > positions": lambda m, x: attend(x, keys(x["user_length"].unsqueeze(1) > torch.arange(LENGTH))),
    "positions <= lengths - 1": lambda m, x: attend(x, keys(torch.arange(LENGTH)[None] <= x["user_length"][:, None] - 1)),
    "not positions >= lengths": lambda m, x: attend(x, keys(~(torch.arange(LENGTH) >= x["user_length"].unsqueeze(1)))),
    "expanded positions": lambda m, x: attend(
        x, (torch.arange(LENGTH).expand(x["item_q"].shape[0], LENGTH) < x["user_length"][:, None]).view(-1, 1, 1, LENGTH)
    ),
    "table of positions": lambda m, x: attend(x, keys(m.positions < x["user_length"].unsqueeze(1))),
    "compared in four dimensions": lambda m, x: attend(
        x, m.positions.view(1, 1, 1, -1) < x["user_length"].view(-1, 1, 1, 1)
    ),
    "expanded to heads and seeds": lambda m, x: attend(x, keys(valid(x)).expand(-1, HEADS, SEEDS, -1)),
    "minus infinity added": lambda m, x: attend(x, keys(added(~valid(x), x))),
    "minus infinity chosen": lambda m, x: attend(
        x, torch.where(keys(valid(x)), torch.zeros((), dtype=x["item_q"].dtype), NEG_INF)
    ),
    "lengths out of range": lambda m, x: attend(x, keys(torch.arange(LENGTH) < (x["user_length"] * 3 - 2).unsqueeze(1))),
    "fractional lengths": lambda m, x: attend(x, keys(torch.arange(LENGTH) < x["user_length"].unsqueeze(1) / 2)),
    "torch.nn.MultiheadAttention": lambda m, x: module_attention(m, x, ~valid(x)),
}
OTHER_MASKS = {
    "ids that are not padding": lambda m, x: attend(x, keys(x["user_items"] != 0)),
    "padding on the left": lambda m, x: attend(x, keys(x["user_left"].ne(0))),
    "keys from a length on": lambda m, x: attend(x, keys(torch.arange(LENGTH) >= x["user_length"].unsqueeze(1))),
    "two conditions": lambda m, x: attend(x, keys(valid(x) & (x["user_items"] > 3))),
    "padding of torch.nn.MultiheadAttention": lambda m, x: module_attention(m, x, x["user_left"] == 0),
}
ATTENTIONS = {
    "no mask": lambda m, x: attend(x),
    "a scale": lambda m, x: attend(x, scale=0.2),
    "three dimensions": lambda m, x: F.scaled_dot_product_attention(x["item_q"], x["user_k"], x["user_v"]),
    "one query": lambda m, x: F.scaled_dot_product_attention(x["item_q"][:, :1], x["user_k"], x["user_v"]),
    "grouped heads": lambda m, x: F.scaled_dot_product_attention(
        heads(x["item_q"], 4), heads(x["user_k"][..., :4]), heads(x["user_v"][..., 4:]), enable_gqa=True
    ),
    "flat heads": lambda m, x: F.scaled_dot_product_attention(
        flat_heads(x["item_q"]), flat_heads(x["user_k"]), flat_heads(x["user_v"])
    ),
    "torch.nn.MultiheadAttention without mask": lambda m, x: module_attention(m, x),
    "written out": lambda m, x: written_out(x, 1 / math.sqrt(DIM)),
    "written out with bmm": lambda m, x: torch.bmm(
        torch.softmax(torch.bmm(x["item_q"], x["user_k"].transpose(1, 2)) / 2.5, dim=2), x["user_v"]
    ),
    "written out, flat heads": lambda m, x: torch.bmm(
        torch.bmm(flat_heads(x["item_q"]), flat_heads(x["user_k"]).transpose(1, 2)).softmax(-1), flat_heads(x["user_v"])
    ),
    "written out, one head of keys": lambda m, x: torch.matmul(
        (heads(x["item_q"]) @ heads(x["user_k"][..., :DIM], 1).mT).softmax(-1), heads(x["user_v"][..., :DIM], 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "forms, sorts", [(PREFIX_MASKS, False), (OTHER_MASKS, True), (ATTENTIONS, False)], ids=["prefix", "other", "unmasked"]
)
def test_target_attention(tmp_path, forms, sorts):
    targets, report = check_forms(forms, used(("user_k", "user_v", "user_l", "user_i", "item_q"), examples()), tmp_path)
    assert count(targets, "target_attention") == len(forms), targets
    assert not report["stops"], report
    assert targets.count("torch.ops.aten.argsort.stable") == (len(forms) if sorts else 0), targets


def masked_scores(x, fill):
    scores = heads(x["item_q"]) @ heads(x["user_k"]).transpose(-2, -1)
    return scores.masked_fill(~keys(valid(x)), fill).softmax(-1) @ heads(x["user_v"])


NO_ATTENTIONS = {
    "causal": lambda m, x: attend(x, is_causal=True),
    "one mask for all": lambda m, x: attend(x, torch.ones(SEEDS, LENGTH, dtype=torch.bool).tril(2)),
    "mask of the candidate": lambda m, x: attend(x, keys(x["user_items"] != x["item_id"].unsqueeze(1))),
    "mask a head": lambda m, x: attend(
        x, (x["user_items"].unsqueeze(1) % torch.arange(2, 2 + HEADS).unsqueeze(1) != 0).unsqueeze(2)
    ),
    "mask a seed": lambda m, x: attend(
        x, (keys(valid(x)) & torch.ones(SEEDS, LENGTH, dtype=torch.bool).triu(1)).expand(-1, HEADS, -1, -1)
    ),
    # Not infinity: a user without history gets a mean over the padding.
    "minus a billion added": lambda m, x: attend(x, keys(added(~valid(x), x)).clamp(min=-1e9)),
    "minus a billion filled in": lambda m, x: masked_scores(x, -1e9),
    "minus infinity filled in": lambda m, x: masked_scores(x, NEG_INF).nan_to_num(-1),  # NaN for a user without history
    "bias": lambda m, x: attend(x, keys(x["user_k"].sum(-1))),
    "candidate among the keys": lambda m, x: F.scaled_dot_product_attention(
        x["item_q"], torch.cat([x["user_k"], x["item_q"]], 1), torch.cat([x["user_v"], x["item_q"]], 1)
    ),
    "values of another width": lambda m, x: F.scaled_dot_product_attention(x["item_q"], x["user_k"], x["user_v"][..., :3]),
    "candidates' values": lambda m, x: F.scaled_dot_product_attention(
        x["item_q"], x["user_k"], x["user_v"] * x["item_q"][:, :1]
    ),
    "softmax over seeds": lambda m, x: (x["item_q"] @ x["user_k"].mT).softmax(1) @ x["user_v"],
}  # fmt: skip


def test_what_is_no_target_attention(tmp_path):
    targets, report = check_forms(NO_ATTENTIONS, examples(), tmp_path)
    assert count(targets, "target_attention") == 0, targets
    assert report["stops"], "the copies are reported"


def test_dropout_that_is_left_on_stays_as_it_is(tmp_path):
    forms = {"dropout": lambda m, x: attend(x, dropout_p=0.5)}
    export(Forms(forms), used(("user_k", "user_v", "item_q"), examples()), tmp_path / "m.pt2")
    report = transform(tmp_path / "m.pt2", tmp_path / "m.ikbo.pt2")
    assert count([o["target"] for o in roles(tmp_path / "m.ikbo.pt2").values()], "target_attention") == 0
    assert any("random numbers" in warning for warning in report["warnings"])


class Both(nn.Module):
    """Rows of attention in a stack that is compressed: what the two make of each other, in every mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, K_USER + SEEDS + 1))
        self.out = nn.Linear(ROWS * WIDTH, 1)

    def forward(self, x):
        seeds = attend(x, keys(valid(x))).transpose(1, 2).flatten(2)[..., :WIDTH]
        rows = torch.cat([x["user_rows"], seeds, x["item_row"].unsqueeze(1)], dim=1)
        return self.out(torch.relu(self.weight @ rows).flatten(1)).squeeze(1)


def test_attention_in_a_compressed_stack(tmp_path):
    example = used(("user_k", "user_v", "user_length", "user_rows", "item_q", "item_row"), examples())
    del example["item_rows"]
    reports = check(Both(), example, tmp_path)
    found = {mode: [o["target"] for o in roles(tmp_path / f"model.{mode}.pt2").values()] for mode in reports}
    assert count(found["ikbo"], "linear_compression") == count(found["ikbo"], "target_attention") == 1
    for mode in ("split", "broadcast"):
        assert not any(".ikbo." in t and "broadcast" not in t for t in found[mode]), found[mode]
