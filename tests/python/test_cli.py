"""The command `ikbo` from end to end: a small model is exported in Python, the rest is the command."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from ikbo import __version__

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (["inspect"], ["transform"], ["verify"], ["spec"], ["score"], ["bench"], ["bench", "model"], ["bench", "lce"],
            ["tune"], ["tune", "lce"])


def binary():
    named = os.environ.get("IKBO")
    places = [Path(named)] if named else [ROOT / "build" / p / "cli/ikbo" for p in ("release", "tests")]
    for place in places:
        if place.exists():
            return str(place)
    pytest.skip("ikbo is not built: cmake --preset release && cmake --build --preset release")


def ikbo(*arguments):
    return subprocess.run([binary(), *map(str, arguments)], capture_output=True, text=True)


def fine(*arguments):
    result = ikbo(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Ranker(nn.Module):
    """User and history against an item and its price, with an attention over the history."""

    def __init__(self, dead=False):
        super().__init__()
        self.users = nn.Embedding(12, 8)
        self.items = nn.Embedding(30, 8, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(25, 16), nn.ReLU(), nn.Linear(16, 1))
        self.dead = dead

    def forward(self, x):
        user = self.users(x["user_id"])
        history = self.items(x["hist_item"])
        item = self.items(x["item"])
        weight = (history * item.unsqueeze(1)).sum(-1).masked_fill(x["hist_item"] == 0, -1e9).softmax(-1)
        interest = (weight.unsqueeze(-1) * history).sum(1)
        if self.dead:
            user, interest = user * 0, interest * 0
        return torch.sigmoid(self.layers(torch.cat([user, interest, item, x["price"].unsqueeze(1)], 1))).squeeze(1)


def example(rows):
    history = torch.randint(1, 30, (rows, 6))
    history[:, 4:] = 0
    return {"user_id": torch.randint(0, 12, (rows,)), "hist_item": history, "item": torch.randint(1, 30, (rows,)),
            "price": torch.randn(rows)}


def export(path, **options):
    batch = torch.export.Dim("batch")
    x = example(4)
    program = torch.export.export(Ranker(**options).eval(), (x,), dynamic_shapes=({k: {0: batch} for k in x},))
    program = program.run_decompositions({})
    torch.export.save(program, path)
    return program


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    binary()
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(5)
    program = export(folder / "ranker.pt2")
    requests = []
    for i, count in enumerate((3, 1, 0, 40)):
        rows = example(max(count, 1))
        requests.append({"id": f"user {i}",
                         "user": {"user_id": i, "hist_item": rows["hist_item"][0].tolist()},
                         "candidates": {"item": rows["item"][:count].tolist(), "price": rows["price"][:count].tolist()},
                         "labels": [n % 2 for n in range(count)],
                         "baselines": {"popularity": list(range(count))},
                         "names": [f"Film {n} é" for n in range(count)],
                         "history_names": [f"Seen {n}" for n in range(12)]})
    (folder / "requests.json").write_text(json.dumps({"requests": requests}))
    fine("transform", folder / "ranker.pt2", "--request-only", "user_*,hist_*")
    return folder, program, requests


def broadcast(request):
    count = len(request["candidates"]["item"])
    return {"user_id": torch.tensor([request["user"]["user_id"]] * count),
            "hist_item": torch.tensor([request["user"]["hist_item"]] * count),
            "item": torch.tensor(request["candidates"]["item"]),
            "price": torch.tensor(request["candidates"]["price"], dtype=torch.float32)}


def test_inspect_names_inputs_and_ids(made):
    folder, _, _ = made
    report = json.loads(fine("inspect", folder / "ranker.pt2", "--json", "--check"))
    inputs = {i["name"]: i for i in report["inputs"]}
    assert list(inputs) == ["user_id", "hist_item", "item", "price"]
    assert inputs["user_id"]["ids"] == [{"min": 0, "max": 11, "table": "users.weight", "columns": []}]
    assert inputs["hist_item"]["ids"][0]["max"] == 29
    assert inputs["price"]["ids"] == []
    assert report["damaged"] == [] and not report["transformed"]
    assert report["weights"]["tensors"] == 6
    text = fine("inspect", folder / "ranker.ikbo.pt2")
    assert "Transformed" in text and "candidate_to_user" in text


def test_inspect_check_finds_a_flipped_bit(made, tmp_path):
    folder, _, _ = made
    data = bytearray((folder / "ranker.pt2").read_bytes())
    weight = torch.export.load(folder / "ranker.pt2").state_dict["users.weight"]
    place = data.find(bytes(weight.untyped_storage())[:64])
    assert place > 0
    data[place + 5] ^= 1
    (tmp_path / "bad.pt2").write_bytes(data)
    result = ikbo("inspect", tmp_path / "bad.pt2", "--check")
    assert result.returncode == 1 and "damaged" in result.stdout


def test_verify_passes_and_fails(made, tmp_path):
    folder, _, _ = made
    good = json.loads(fine("verify", folder / "ranker.pt2", folder / "ranker.ikbo.pt2", "--json"))
    assert good["passed"] and good["float64"] and good["user_inputs_move_scores"]
    assert "Passed" in fine("verify", folder / "ranker.pt2", folder / "ranker.ikbo.pt2", "--requests",
                            folder / "requests.json")
    torch.manual_seed(6)
    export(tmp_path / "other.pt2")
    result = ikbo("verify", tmp_path / "other.pt2", folder / "ranker.ikbo.pt2")
    assert result.returncode == 1 and "FAILED" in result.stdout


def test_verify_refuses_a_dead_model(tmp_path):
    binary()
    export(tmp_path / "dead.pt2", dead=True)
    fine("transform", tmp_path / "dead.pt2", "--request-only", "user_id,hist_item")
    result = ikbo("verify", tmp_path / "dead.pt2", tmp_path / "dead.ikbo.pt2")
    assert result.returncode == 1 and "DO NOT move the score" in result.stdout
    fine("verify", tmp_path / "dead.pt2", tmp_path / "dead.ikbo.pt2", "--allow-dead")


def test_score_is_the_original_on_repeated_rows(made, tmp_path):
    folder, program, requests = made
    text = fine("score", folder / "ranker.ikbo.pt2", "--requests", folder / "requests.json", "-o",
                tmp_path / "scores.json", "--top", "3", "--show", "1")
    scores = json.loads((tmp_path / "scores.json").read_text())["requests"]
    assert [s["id"] for s in scores] == [r["id"] for r in requests]
    for scored, request in zip(scores, requests):
        if not request["names"]:
            assert scored["scores"] == []
            continue
        expected = program.module()(broadcast(request))
        torch.testing.assert_close(torch.tensor(scored["scores"]), expected.detach(), rtol=1e-5, atol=1e-6)
    best = max(range(3), key=lambda n: scores[0]["scores"][n])
    ranked = [line for line in text.splitlines() if "Film" in line]
    assert len(ranked) == 3 and ranked[0].split()[0] == "1" and f"Film {best} é" in ranked[0]
    assert "Seen 11" in text and "Seen 1\n" not in text and "3 users" in text


def test_spec_gives_every_size(made):
    folder, _, _ = made
    spec = json.loads(fine("spec", folder / "ranker.ikbo.pt2", "--json"))
    assert spec["operators"]
    text = fine("spec", folder / "ranker.ikbo.pt2")
    assert "B_user" in text and "B_cand" in text
    assert ikbo("spec", folder / "ranker.pt2").returncode == 2


def test_bench_model(made, tmp_path):
    folder, _, _ = made
    arguments = ("bench", "model", folder / "ranker.pt2", "--request-only", "user_*,hist_*", "--seconds", "0.1")
    result = json.loads(fine(*arguments, "--requests", folder / "requests.json", "--json", "-o", tmp_path / "b.json"))
    assert result == json.loads((tmp_path / "b.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {"broadcast", "split", "ikbo"}
    # 44 candidates hold the user's id and six items of history at least.
    assert rows["broadcast"]["replicated_bytes"] > 44 * 7 * 8
    assert rows["ikbo"]["replicated_bytes"] < rows["broadcast"]["replicated_bytes"]
    for row in rows.values():
        assert 0 < row["us"] <= row["us_p99"] and row["operators"] > 5
        assert row["largest_difference"] < 1e-5
        assert row["peak_bytes"] > 44 * 4
        assert abs(row["auc"] - rows["broadcast"]["auc"]) < 1e-9
    assert result["baselines"][0]["name"] == "popularity"
    assert rows["ikbo"]["peak_bytes"] < rows["broadcast"]["peak_bytes"]
    text = fine(*arguments, "--users", "3", "--candidates", "10", "--runs", "2", "--operators", "99")
    assert "3 users, 30 candidates" in text
    assert text.count("in its operators") == 3 and "torch.ops.ikbo.linear.default" in text


BAD_REQUESTS = [
    (lambda r: r[0]["user"].pop("user_id"), ["user 0", "user_id", "missing"]),
    (lambda r: r[3]["user"].update(user_id=12), ["user 3", "user_id", "12", "0 to 11"]),
    (lambda r: r[3]["candidates"]["item"].__setitem__(7, 30), ["user 3", "'item'[7] is 30", "0 to 29"]),
    (lambda r: r[0]["user"]["hist_item"].pop(), ["user 0", "hist_item", "expected 6", "given 5"]),
    (lambda r: r[0]["candidates"]["price"].append(1), ["user 0", "price", "expected 3", "given 4"]),
    (lambda r: r[0]["candidates"]["item"].__setitem__(0, 1.5), ["user 0", "'item'[0]", "integer"]),
    (lambda r: r[0]["candidates"].update(colour=[1, 2, 3]), ["user 0", "colour", "item, price"]),
    (lambda r: r[0]["candidates"]["price"].__setitem__(1, float("nan")), ["not JSON"]),
]


@pytest.mark.parametrize("case", range(len(BAD_REQUESTS)))
def test_wrong_requests_are_named(made, tmp_path, case):
    folder, _, requests = made
    change, parts = BAD_REQUESTS[case]
    changed = json.loads(json.dumps(requests))
    change(changed)
    (tmp_path / "r.json").write_text(json.dumps({"requests": changed}))
    result = ikbo("score", folder / "ranker.ikbo.pt2", "--requests", tmp_path / "r.json")
    assert result.returncode == 2 and result.stdout == ""
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.mark.parametrize("arguments", [
    (), ("rank",), ("inspect",), ("inspect", "nowhere.pt2"), ("inspect", "requests.json"), ("spec", "ranker.pt2"),
    ("transform", "ranker.pt2"), ("transform", "ranker.pt2", "--request-only", "nobody_*"),
    ("transform", "ranker.pt2", "--request-only", "user_*", "--mode", "fast"),
    ("score", "ranker.pt2", "--requests", "requests.json"), ("score", "ranker.ikbo.pt2", "--requests", "ranker.pt2"),
    ("score", "ranker.ikbo.pt2", "--requests", "requests.json", "--threads", "0"),
    ("score", "ranker.ikbo.pt2", "--requests", "requests.json", "-o", "no/such/folder/s.json"),
    ("verify", "ranker.pt2", "ranker.pt2"), ("bench", "model", "ranker.pt2"),
], ids=" ".join)
def test_bad_input_is_exit_code_2(made, arguments):
    folder, _, _ = made
    result = ikbo(*((folder / a if a.split(".")[-1] in ("pt2", "json") else a) for a in arguments))
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr and len(result.stderr) < 2000


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(command):
    assert "Example:" in fine(*command, "--help")


def test_kernels_are_measured_by_a_program_beside_the_command(tmp_path, monkeypatch):
    program = tmp_path / "lce_bench"
    program.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("IKBO_LCE_BENCH", str(program))
    done = ikbo("tune", "lce", "--batch", "96", "--n", "64", "--type", "fp16", "-o", "t.json")
    assert done.returncode == 7
    assert "--cases tune --type fp16 --batch 96 --ratio 70 --m 433 --n 64" in done.stdout
    assert done.stdout.endswith("--rounds 15 --json t.json\n")
    done = ikbo("bench", "lce", "--cases", "sweep", "--stage", "fused_ws")
    assert "--cases sweep --type both" in done.stdout
    assert "--stage fused_ws" in done.stdout
    for wrong in (("--batch", "0"), ("--type", "fp32"), ("--cases", "tune")):
        assert ikbo("bench", "lce", *wrong).returncode == 2
    monkeypatch.setenv("IKBO_LCE_BENCH", str(tmp_path / "nothing"))
    done = ikbo("bench", "lce")
    assert done.returncode == 2
    assert "nothing" in done.stderr


class Packed(nn.Module):
    """One matrix whose columns are features: ids of user, item and a price, cast inside."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(12, 8)
        self.items = nn.Embedding(30, 8)
        self.out = nn.Linear(17, 1)

    def forward(self, X):
        parts = [self.items(X[:, 0:1].long()).flatten(1), X[:, 1:2], self.users(X[:, 2].long())]
        return torch.sigmoid(self.out(torch.cat(parts, 1)))


def test_packed_input(tmp_path):
    binary()
    matrix = torch.tensor([[5.0, 0.5, 7.0], [29.0, -1.0, 7.0], [0.0, 2.0, 11.0]])
    program = torch.export.export(Packed().eval(), (matrix,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    program = program.run_decompositions({})
    torch.export.save(program, tmp_path / "packed.pt2")
    inputs = json.loads(fine("inspect", tmp_path / "packed.pt2", "--json"))["inputs"]
    assert {(r["max"], r["columns"][0][1]) for r in inputs[0]["ids"]} == {(29, 0), (11, 2)}
    fine("transform", tmp_path / "packed.pt2", "--request-only", "X[:,2:3]")
    fine("verify", tmp_path / "packed.pt2", tmp_path / "packed.ikbo.pt2")
    requests = [{"id": "a", "user": {"X": [7]}, "candidates": {"X": [[5, 0.5], [29, -1]]}},
                {"id": "b", "user": {"X": [11]}, "candidates": {"X": [[0, 2]]}}]
    (tmp_path / "r.json").write_text(json.dumps({"requests": requests}))
    scores = json.loads(fine("score", tmp_path / "packed.ikbo.pt2", "--requests", tmp_path / "r.json", "--json"))
    rows = torch.tensor([s for r in scores["requests"] for s in r["scores"]])
    torch.testing.assert_close(rows, program.module()(matrix).detach(), rtol=1e-5, atol=1e-6)
    fine("verify", tmp_path / "packed.pt2", tmp_path / "packed.ikbo.pt2", "--requests", tmp_path / "r.json")
    requests[0]["candidates"]["X"][1][0] = 30
    (tmp_path / "r.json").write_text(json.dumps({"requests": requests}))
    result = ikbo("score", tmp_path / "packed.ikbo.pt2", "--requests", tmp_path / "r.json")
    assert result.returncode == 2 and "[1][0] is 30" in result.stderr and "0 to 29" in result.stderr


def test_version():
    assert fine("--version").strip() == f"ikbo {__version__}"
