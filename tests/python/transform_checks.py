"""Exports models, transforms them with the command, and compares the results with the models themselves."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import ikbo  # noqa: F401 - torch.export.load needs the operators

ROOT = Path(__file__).resolve().parents[2]
MODES = ("ikbo", "split", "broadcast")
USERS, CANDIDATES = 4, 9


def binary():
    named = os.environ.get("IKBO")
    places = [Path(named)] if named else [ROOT / "build" / p / "cli/ikbo" for p in ("tests", "release")]
    for place in places:
        if place.exists():
            return str(place)
    pytest.skip("ikbo is not built: cmake --preset release && cmake --build --preset release")


def command(*arguments):
    return subprocess.run([binary(), *map(str, arguments)], capture_output=True, text=True)


def export(model, example, path, dynamic=None, decompose=True):
    batch = torch.export.Dim("batch")
    dynamic = dynamic or ({k: {0: batch} for k in example},)
    exported = torch.export.export(model.eval(), (example,), dynamic_shapes=dynamic, strict=False)
    if decompose:
        exported = exported.run_decompositions({})
    torch.export.save(exported, path)
    return exported


def transform(path, out, request_only="user_*", mode="ikbo"):
    result = command("transform", path, "--request-only", request_only, "-o", out, "--mode", mode, "--json", "--report")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def refusal(path, request_only="user_*"):
    result = command("transform", path, "--request-only", request_only, "-o", Path(path).with_suffix(".out.pt2"))
    assert result.returncode == 2, result.stdout
    return result.stderr


def is_user(name):
    return name.startswith("user_")


def draw(example, users, candidates):
    """Rows of both sides, by drawing rows of the example and changing the floating-point ones."""

    def rows(tensor, count):
        drawn = tensor[torch.randint(len(tensor), (count,))]
        return drawn + 0.1 * torch.randn_like(drawn) if drawn.is_floating_point() else drawn

    return {k: rows(v, users if is_user(k) else candidates) for k, v in example.items()}


def replicate(rows, index):
    return {k: v[index.long()] if is_user(k) else v for k, v in rows.items()}


def check(model, example, tmp_path, tolerance=1e-5, **options):
    """Transforms in every mode and compares torch.export.load(...).module() with the model, at other batch sizes."""
    path = tmp_path / "model.pt2"
    export(model, example, path, **options)
    reports = {}
    for mode in MODES:
        out = tmp_path / f"model.{mode}.pt2"
        reports[mode] = transform(path, out, mode=mode)
        module = torch.export.load(out).module()
        for users, candidates in ((USERS, CANDIDATES), (5, 5), (1, 3), (6, 2)):
            rows = draw(example, users, candidates)
            index = torch.randint(users, (candidates,), dtype=torch.int32)
            with torch.no_grad():
                expected = model(replicate(rows, index))
                given = module(rows, index)
            scale = expected.abs().max().clamp(min=1e-3)
            assert given.shape == expected.shape
            assert ((given - expected).abs().max() / scale) <= tolerance, (mode, users, candidates)
    return reports


def roles(out):
    result = command("spec", out, "--json")
    assert result.returncode == 0, result.stderr
    return {o["node"]: o for o in json.loads(result.stdout)["operators"]}
