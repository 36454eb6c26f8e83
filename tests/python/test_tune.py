"""`ikbo tune ARCHIVE`: what it measures, what it stores, and that the operators take it. A stand-in measures where there is
no GPU."""

import json
import os
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ikbo
from conftest import DEVICE, cpu_only
from test_cli import binary, fine
from test_cli import ikbo as command

ROWS, WIDTH, K_USER, K_ITEM = 12, 16, 5, 3
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU and IKBO_TEST_DEVICE=cuda")

# Answers as the program that measures does: of two configurations the one with a cluster is faster from 100 candidates on.
STAND_IN = """#!{python}
import json, os, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({log!r}, "a") as log:
    print(json.dumps(arguments), file=log)
print("a line that is no answer", file=sys.stderr, flush=True)
print(json.dumps({{"device": "Stand-in", "multiprocessors": 7}}), flush=True)
for number, point in enumerate(arguments["--points"].split(";")):
    if number == {stop}:
        {failure}
    large = int(point.split(",")[4]) >= 100
    times = [{{"block_m": 64, "cluster": 1, "us": 30.0}}, {{"block_m": 152, "cluster": 2, "us": 20.0 if large else 40.0}}]
    print(json.dumps({{"by_model": {{"block_m": 64, "cluster": 1}}, "configurations": times}}), flush=True)
"""


class Compressing(nn.Module):
    """A stack of embeddings, and a second one of the same sizes, compressed by two weights."""

    def __init__(self, rows=ROWS):
        super().__init__()
        self.first = nn.Parameter(torch.randn(rows, K_USER + K_ITEM) / 3)
        self.second = nn.Parameter(torch.randn(rows, K_USER + K_ITEM) / 3)
        self.narrow = nn.Parameter(torch.randn(4, K_USER + K_ITEM) / 3)

    def forward(self, x):
        stack = torch.cat([x["user_rows"], x["item_rows"]], 1)
        return ((self.first @ stack) + torch.tanh(self.second @ stack)).sum((1, 2)) + (self.narrow @ stack).sum((1, 2))


class Adding(nn.Module):
    def forward(self, x):
        return (x["user_rows"].sum(1) * x["item_rows"].sum(1)).sum(1)


def archive(folder, dtype=torch.bfloat16, model=Compressing, name="m", options=()):
    binary()
    with torch.device("cpu"):
        x = {"user_rows": torch.randn(4, K_USER, WIDTH).to(dtype), "item_rows": torch.randn(4, K_ITEM, WIDTH).to(dtype)}
        batch = torch.export.Dim("batch")
        program = torch.export.export(model().to(dtype).eval(), (x,), dynamic_shapes=({k: {0: batch} for k in x},))
    torch.export.save(program.run_decompositions({}), folder / f"{name}.pt2")
    fine("transform", folder / f"{name}.pt2", "--request-only", "user_*", *options)
    return folder / f"{name}.ikbo.pt2"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts the stand-in in place; returns a function that replaces it, and one that gives its calls."""
    log = tmp_path / "calls.jsonl"
    program = tmp_path / "lce_bench"

    def place(stop=-1, failure="pass"):
        program.write_text(STAND_IN.format(python=sys.executable, log=str(log), stop=stop, failure=failure))
        program.chmod(0o755)

    place()
    monkeypatch.setenv("IKBO_LCE_BENCH", str(program))
    return place, lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def stored(path):
    with zipfile.ZipFile(path) as file:
        name = next(n for n in file.namelist() if n.endswith("/extra/ikbo.json"))
        return json.loads(file.read(name)).get("configurations")


def rewrite(path, to, change):
    """The archive with its specification changed by hand, all else as it was."""
    import torch._C as c  # the writer that torch.export.save uses: members must be aligned and uncompressed

    with zipfile.ZipFile(path) as file:
        members = [(n.split("/", 1)[1], file.read(n)) for n in file.namelist()]
    writer = c.PyTorchFileWriter(str(to))
    for name, contents in members:
        if name in ("version", "byteorder", ".data/serialization_id", ".data/version"):
            continue
        if name == "extra/ikbo.json":
            specification = json.loads(contents)
            change(specification)
            contents = json.dumps(specification).encode()
        writer.write_record(name, contents, len(contents))
    writer.write_end_of_file()
    return to


def refused(*arguments):
    result = command(*arguments)
    assert result.returncode == 2 and result.stdout == "", result.stdout + result.stderr
    return result.stderr


@cpu_only
def test_the_archive_keeps_the_fastest_of_every_point(tmp_path, stand_in):
    made = archive(tmp_path)
    text = fine("tune", made, "-o", tmp_path / "tuned.pt2", "--candidates", "10,200", "--rounds", "3")
    assert stand_in[1]() == [{
        # Two operators have the same sizes and are measured once.
        "--points": "bf16,12,16,3,10,1x5;bf16,12,16,3,200,3x5;bf16,4,16,3,10,1x5;bf16,4,16,3,200,3x5", "--rounds": "3",
    }]  # fmt: skip
    device, = stored(tmp_path / "tuned.pt2")
    assert (device["device"], device["multiprocessors"]) == ("Stand-in", 7)
    assert [(s["m"], s["n"], s["k_candidate"], s["k_broadcast"], s["dtype"]) for s in device["linear_compression"]] == [
        (12, 16, 3, [5], "bfloat16"), (4, 16, 3, [5], "bfloat16")]  # fmt: skip
    assert device["linear_compression"][0]["points"] == [
        {"candidates": 10, "rows": [1], "block_m": 64, "cluster": 1, "us": 30.0, "us_by_model": 30.0},
        {"candidates": 200, "rows": [3], "block_m": 152, "cluster": 2, "us": 20.0, "us_by_model": 30.0}]  # fmt: skip
    assert "Stand-in, 7 multiprocessors" in text and "50.0%" in text and "At 2 of 4 points" in text
    assert "152 rows of W, 2 CTAs" in text
    shown = fine("spec", tmp_path / "tuned.pt2")
    assert "Configurations measured on Stand-in with 7 multiprocessors" in shown and "50.0%" in shown
    assert json.loads(fine("spec", tmp_path / "tuned.pt2", "--json"))["configurations"] == stored(tmp_path / "tuned.pt2")


@cpu_only
def test_nothing_else_of_the_archive_changes(tmp_path, stand_in):
    made = archive(tmp_path)
    fine("tune", made, "-o", tmp_path / "tuned.pt2")
    with zipfile.ZipFile(made) as before, zipfile.ZipFile(tmp_path / "tuned.pt2") as after:
        inside = lambda file: {n.split("/", 1)[1]: file.read(n) for n in file.namelist()}  # noqa: E731
        old, new = inside(before), inside(after)
    specification, tuned = json.loads(old.pop("extra/ikbo.json")), json.loads(new.pop("extra/ikbo.json"))
    del tuned["configurations"]
    assert specification == tuned
    ids = [name for name in new if name.startswith(".data/serialization_id")]
    for name in ids:
        old.pop(name), new.pop(name)
    assert old == new
    rows = {"user_rows": torch.randn(2, K_USER, WIDTH).bfloat16(), "item_rows": torch.randn(5, K_ITEM, WIDTH).bfloat16()}
    index = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    first, second = (torch.export.load(p).module()(rows, index) for p in (made, tmp_path / "tuned.pt2"))
    assert torch.equal(first, second)
    fine("verify", tmp_path / "m.pt2", tmp_path / "tuned.pt2")
    # In place, and anew: what was stored for the device is replaced.
    shutil.copy(tmp_path / "tuned.pt2", tmp_path / "again.pt2")
    fine("tune", tmp_path / "again.pt2", "-o", tmp_path / "again.pt2", "--candidates", "50")
    assert [p["candidates"] for d in stored(tmp_path / "again.pt2") for p in d["linear_compression"][0]["points"]] == [50]


@cpu_only
def test_what_another_device_measured_stays(tmp_path, stand_in):
    made = archive(tmp_path)
    fine("tune", made, "-o", tmp_path / "a.pt2", "--candidates", "50")

    def rename(specification):
        specification["configurations"][0]["device"] = "Another"

    rewrite(tmp_path / "a.pt2", tmp_path / "b.pt2", rename)
    fine("tune", tmp_path / "b.pt2", "-o", tmp_path / "c.pt2", "--candidates", "60")
    assert [d["device"] for d in stored(tmp_path / "c.pt2")] == ["Another", "Stand-in"]


@cpu_only
def test_points_stay_inside_the_archives_ranges(tmp_path, stand_in):
    made = archive(tmp_path, options=("--max-candidates", "300", "--max-users", "2"))
    fine("tune", made, "-o", tmp_path / "t.pt2")
    points = stored(tmp_path / "t.pt2")[0]["linear_compression"][0]["points"]
    assert [(p["candidates"], p["rows"]) for p in points] == [(16, [1]), (64, [1]), (256, [2]), (300, [2])]
    fine("tune", made, "-o", tmp_path / "t.pt2", "--candidates", "20,1", "--users", "1,2")
    points = stored(tmp_path / "t.pt2")[0]["linear_compression"][0]["points"]
    assert [(p["candidates"], p["rows"]) for p in points] == [(20, [1]), (20, [2]), (1, [1])]
    assert "301 candidates: the archive allows" in refused("tune", made, "-o", "t.pt2", "--candidates", "301")
    assert "3 users: the archive allows" in refused("tune", made, "-o", "t.pt2", "--users", "3")
    assert "larger than every" in refused("tune", made, "-o", "t.pt2", "--candidates", "1", "--users", "2")


@cpu_only
def test_what_cannot_be_tuned_is_said(tmp_path, stand_in, monkeypatch):
    made = archive(tmp_path)
    out = tmp_path / "out.pt2"
    assert "not transformed yet" in refused("tune", tmp_path / "m.pt2", "-o", out)
    assert "has no ikbo::linear_compression" in refused("tune", archive(tmp_path, model=Adding, name="add"), "-o", out)
    single = archive(tmp_path, dtype=torch.float32, name="single")
    assert "it is in float32, and only bfloat16 and float16 have" in refused("tune", single, "-o", out)
    assert "name an archive to tune, or a kernel" in refused("tune")
    assert "name the file to write" in refused("tune", made)
    assert "archive belongs to `ikbo tune ARCHIVE`" in refused("tune", made, "lce")
    assert "--output belongs to `ikbo tune ARCHIVE`" in refused("tune", "-o", out, "lce")
    for wrong in (("--candidates", "0"), ("--candidates", "x"), ("--ratio", "0"), ("--users", "2", "--ratio", "3")):
        assert command("tune", made, "-o", out, *wrong).returncode == 2
    monkeypatch.setenv("IKBO_LCE_BENCH", str(tmp_path / "nothing"))
    message = refused("tune", made, "-o", out)
    assert "cannot be run" in message and "nothing" in message
    assert "no such does not exist" in refused("tune", made, "-o", tmp_path / "no such" / "out.pt2")
    assert not out.exists()


@cpu_only
@pytest.mark.parametrize("failure, parts", [
    ("sys.exit('no GPU to measure on: initialization error')", ["exit code 1", "after 1 of 4 points", "no GPU to measure on"]),
    ("os.kill(os.getpid(), 9)", ["ended by signal 9", "after 1 of 4 points"]),
    ("sys.exit(0)", ["measured 1 of 4 points"]),
    ("print('{')", ["not understood", "{"]),
    ("print(json.dumps({'by_model': {}}))", ["not understood", "'configurations' not found"]),
    ("print(json.dumps({'by_model': {'block_m': 1, 'cluster': 1}, 'configurations': []}))", ["not understood", "choice"]),
], ids=["message", "signal", "silent", "no JSON", "incomplete", "no choice"])  # fmt: skip
def test_a_measurement_that_fails_writes_nothing(tmp_path, stand_in, failure, parts):
    made = archive(tmp_path)
    stand_in[0](stop=1, failure=failure)
    message = refused("tune", made, "-o", tmp_path / "out.pt2", "--candidates", "10,200")
    for part in parts:
        assert part in message, message
    assert not (tmp_path / "out.pt2").exists()


@cpu_only
def test_a_device_without_a_gpu_is_named_by_the_program_itself(tmp_path, monkeypatch):
    program = Path(binary()).parents[1] / "kernels/bench/lce_bench"
    if not program.exists() or torch.cuda.is_available():
        pytest.skip("needs lce_bench and no GPU")
    monkeypatch.delenv("IKBO_LCE_BENCH", raising=False)
    message = refused("tune", archive(tmp_path), "-o", tmp_path / "out.pt2")
    assert "after 0 of" in message and "no GPU to measure on" in message


def change_point(**values):
    def change(specification):
        for shape in specification["configurations"][0]["linear_compression"]:
            for point in shape["points"]:
                point.update(values)

    return change


@cpu_only
def test_a_damaged_archive_is_refused_on_any_device(tmp_path, stand_in):
    made = archive(tmp_path)
    fine("tune", made, "-o", tmp_path / "t.pt2", "--candidates", "50")
    bad = rewrite(tmp_path / "t.pt2", tmp_path / "bad.pt2", change_point(block_m="large"))
    for arguments in (("spec", bad), ("verify", tmp_path / "m.pt2", bad)):
        assert "configurations[0].linear_compression[0].points[0].block_m is string, expected an integer" in refused(*arguments)
    # What a later version may add changes nothing, and stays when the archive is tuned again.
    extended = rewrite(tmp_path / "t.pt2", tmp_path / "extended.pt2", change_point(watts=700))
    extended = rewrite(extended, tmp_path / "more.pt2", lambda specification: specification.update(added=[1]))
    fine("tune", extended, "-o", extended)
    with zipfile.ZipFile(extended) as file:
        assert json.loads(file.read("more/extra/ikbo.json"))["added"] == [1]
    # A configuration that no kernel has concerns the device alone that it is for.
    fine("verify", tmp_path / "m.pt2", rewrite(tmp_path / "t.pt2", tmp_path / "other.pt2", change_point(block_m=65)))


@cpu_only
def test_python_without_a_gpu_uses_none(tmp_path, stand_in):
    made = archive(tmp_path)
    fine("tune", made, "-o", tmp_path / "t.pt2", "--candidates", "50")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert ikbo.use_configurations(tmp_path / "t.pt2") == 0
    with pytest.raises(ValueError, match="not transformed yet"):
        ikbo.use_configurations(tmp_path / "m.pt2")
    (tmp_path / "no.pt2").write_text("nothing")
    with pytest.raises(ValueError, match="no.pt2: not an archive"):
        ikbo.use_configurations(tmp_path / "no.pt2")
    with pytest.raises(OSError):
        ikbo.use_configurations(tmp_path / "nowhere.pt2")


# ---- On a GPU -------------------------------------------------------------------------------------------------------


def this_gpu():
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "multiprocessors": properties.multi_processor_count}


def stored_for_this_gpu(path, to, **values):
    def change(specification):
        change_point(**values)(specification)
        specification["configurations"][0].update(this_gpu())

    return rewrite(path, to, change)


def config_now(m, candidates, users, dtype=torch.bfloat16):
    """(tile height, cluster, measured) that the operator takes now."""
    return tuple(torch.ops.ikbo.linear_compression_config(
        torch.device("cuda", 0), dtype, m, WIDTH, K_ITEM, [K_USER], candidates, [users]
    ))  # fmt: skip


def kernels_run(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "linear_compression" in event.name]


@needs_gpu
def test_a_stored_configuration_is_used_with_the_same_bits(tmp_path, stand_in):
    # Sizes of this test alone, since a process keeps what it was given.
    m = 301
    made = archive(tmp_path, model=lambda: Compressing(m))
    fine("tune", made, "-o", tmp_path / "t.pt2", "--candidates", "100")
    tensors = [torch.randn(*shape).bfloat16() for shape in ((m, K_ITEM), (90, K_ITEM, WIDTH), (m, K_USER), (2, K_USER, WIDTH))]
    index = torch.randint(2, (90,), dtype=torch.int32)
    run = lambda: ikbo.linear_compression(tensors[0], tensors[1], [tensors[2]], [tensors[3]], [index])  # noqa: E731
    assert ikbo.use_configurations(tmp_path / "t.pt2") == 0  # measured on a stand-in
    by_model = config_now(m, 90, 2)
    assert not by_model[2]
    bits = run()
    seen = set()
    for block_m, cluster in ((64, 1), (64, 2), (144, 1), (176, 2)):
        to = tmp_path / f"{block_m}-{cluster}.pt2"
        path = stored_for_this_gpu(tmp_path / "t.pt2", to, block_m=block_m, cluster=cluster)
        assert ikbo.use_configurations(path, "cuda") == 2
        assert config_now(m, 90, 2) == (block_m, cluster, True)
        assert config_now(m, 401, 2)[2] is False and config_now(m, 90, 2, torch.float16)[2] is False
        assert torch.equal(run(), bits)
        seen.update(kernels_run(run))
    if not seen:
        pytest.skip("all but the last step: PyTorch's profiler sees no kernels here")
    assert len(seen) == 4, seen  # another instantiation or form of cluster each


@needs_gpu
def test_the_command_refuses_what_no_kernel_has(tmp_path, stand_in):
    made = archive(tmp_path, model=lambda: Compressing(302))
    fine("tune", made, "-o", tmp_path / "t.pt2", "--candidates", "100")
    bad = stored_for_this_gpu(tmp_path / "t.pt2", tmp_path / "bad.pt2", block_m=65)
    message = refused("verify", tmp_path / "m.pt2", bad, "--device", "cuda")
    assert "there is no kernel for block_m 65" in message and "measure them again with `ikbo tune`" in message
    fine("verify", tmp_path / "m.pt2", bad)  # on the CPU nothing is used
    with pytest.raises(ValueError, match="bad.pt2: its configurations cannot be used: .*block_m 65"):
        ikbo.use_configurations(bad)
    assert config_now(302, 100, 2)[2] is False


@needs_gpu
def test_operators_run_while_configurations_change(tmp_path, stand_in):
    m = 304
    fine("tune", archive(tmp_path, model=lambda: Compressing(m)), "-o", tmp_path / "t.pt2", "--candidates", "100")
    paths = [
        stored_for_this_gpu(tmp_path / "t.pt2", tmp_path / f"{block_m}.pt2", block_m=block_m) for block_m in (64, 96, 160)
    ]
    tensors = [torch.randn(*shape).bfloat16() for shape in ((m, K_ITEM), (90, K_ITEM, WIDTH), (m, K_USER), (2, K_USER, WIDTH))]
    index = torch.randint(2, (90,), dtype=torch.int32)
    run = lambda _: torch.ops.ikbo.linear_compression(tensors[0], tensors[1], [tensors[2]], [tensors[3]], [index])  # noqa: E731
    bits = run(0)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(run, range(800))
        for turn in range(60):
            ikbo.use_configurations(paths[turn % 3])
        assert all(torch.equal(result, bits) for result in results)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_its_own_configurations(tmp_path, stand_in):
    m = 305
    fine("tune", archive(tmp_path, model=lambda: Compressing(m)), "-o", tmp_path / "t.pt2", "--candidates", "100")
    path = stored_for_this_gpu(tmp_path / "t.pt2", tmp_path / "u.pt2", block_m=64, cluster=1)
    assert ikbo.use_configurations(path, "cuda:1") == 2
    now = [torch.ops.ikbo.linear_compression_config(
        torch.device("cuda", i), torch.bfloat16, m, WIDTH, K_ITEM, [K_USER], 100, [2]) for i in (0, 1)]  # fmt: skip
    assert [measured for _, _, measured in now] == [False, True]


@needs_gpu
def test_tune_measures_on_this_gpu(tmp_path):
    program = Path(binary()).parents[1] / "kernels/bench/lce_bench"
    if not program.exists() and "IKBO_LCE_BENCH" not in os.environ:
        pytest.skip("lce_bench is not built")
    made = archive(tmp_path, model=lambda: Compressing(303), dtype=torch.float16)
    fine("tune", made, "-o", tmp_path / "t.pt2", "--candidates", "30,500", "--rounds", "3")
    device, = stored(tmp_path / "t.pt2")
    assert {k: device[k] for k in ("device", "multiprocessors")} == this_gpu()
    points = [point for shape in device["linear_compression"] for point in shape["points"]]
    assert len(points) == 4 and all(0 < p["us"] <= p["us_by_model"] for p in points)
    fine("verify", tmp_path / "m.pt2", tmp_path / "t.pt2", "--device", "cuda")
    assert ikbo.use_configurations(tmp_path / "t.pt2") == 4 * torch.cuda.device_count()
    first = device["linear_compression"][0]
    used = config_now(303, 30, 1, torch.float16)
    assert used == (first["points"][0]["block_m"], first["points"][0]["cluster"], True)
