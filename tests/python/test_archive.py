"""Archives of torch.export.save, read and written again by the C++ reader and writer, against torch.export.load."""

import collections
import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from archive_cases import BATCH, CASES, Integers, ids, tower_case

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (2, 5, 9)


def _tool():
    if "IKBO_ARCHIVE_TOOL" in os.environ:
        return Path(os.environ["IKBO_ARCHIVE_TOOL"])
    # Sanitizers keep memory of their own, which would spoil what is measured here.
    built = [p for p in ROOT.glob("build/*/tests/graph/ikbo_archive_tool") if "sanitize" not in p.parts]
    built.sort(key=lambda p: p.stat().st_mtime)
    return built[-1] if built else None


TOOL = _tool()
pytestmark = pytest.mark.skipif(TOOL is None, reason="build the target ikbo_archive_tool, or set IKBO_ARCHIVE_TOOL")


def tool(*arguments):
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)


def tool_ok(*arguments):
    done = tool(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(path, command="read"):
    done = tool(command, path)
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and str(path) in lines[0], done.stderr
    return lines[0]


def export(case, batch=3, decompose=True):
    args, kwargs = case.call(batch)
    program = torch.export.export(case.model.eval(), args, kwargs, dynamic_shapes=case.dynamic)
    return program.run_decompositions({}) if decompose else program


def storages(table):
    """Names grouped by the storage they view."""
    groups = collections.defaultdict(set)
    for name, tensor in table.items():
        if tensor.numel():
            groups[tensor.untyped_storage().data_ptr()].add(name)
    return sorted(map(sorted, groups.values()))


def assert_same_table(table, expected):
    assert set(table) == set(expected)
    for name, tensor in expected.items():
        other = table[name]
        assert type(other) is type(tensor), name
        assert other.dtype == tensor.dtype and other.shape == tensor.shape and other.stride() == tensor.stride(), name
        assert other.requires_grad == tensor.requires_grad, name
        assert other.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() or not tensor.numel(), name
        raw = lambda t: t.detach().contiguous().view(torch.uint8) if t.dim() and t.numel() else t  # noqa: E731
        assert torch.equal(raw(other), raw(tensor)), name
    assert storages(table) == storages(expected)


def assert_same_tree(tree, expected):
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    expected_leaves, expected_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, other in zip(leaves, expected_leaves):
        if isinstance(other, torch.Tensor):
            assert leaf.dtype == other.dtype and torch.equal(leaf.double(), other.double())
        else:
            assert type(leaf) is type(other) and leaf == other


def assert_same_program(program, expected):
    assert str(program.graph) == str(expected.graph)
    assert program.graph_signature == expected.graph_signature
    assert program.call_spec == expected.call_spec
    assert program.range_constraints == expected.range_constraints
    assert program._guards_code == expected._guards_code
    assert [e.fqn for e in program.module_call_graph] == [e.fqn for e in expected.module_call_graph]
    assert program.module_call_graph[0].signature == expected.module_call_graph[0].signature
    assert_same_table(program.state_dict, expected.state_dict)
    assert_same_table(program.constants, expected.constants)
    assert_same_tree(program.example_inputs, expected.example_inputs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("decompose", [True, False], ids=["decomposed", "raw"])
def test_round_trip(name, decompose, tmp_path):
    case = CASES[name]()
    source, target = tmp_path / "model.pt2", tmp_path / "model.ikbo.pt2"
    torch.export.save(export(case, decompose=decompose), source)
    expected = torch.export.load(source)
    tool_ok("copy", source, target)
    assert tool_ok("check", target) == ""
    program = torch.export.load(target)
    assert_same_program(program, expected)
    module, expected_module = program.module(), expected.module()
    for batch in BATCHES:
        args, kwargs = case.call(batch)
        assert torch.equal(module(*args, **kwargs), expected_module(*args, **kwargs))
    if case.paths is not None:
        inputs = json.loads(tool_ok("read", source))["inputs"]
        assert [i["path"] for i in inputs] == case.paths
        assert [i["name"] for i in inputs] == case.names
        for i in inputs:  # the keys lead to the tensor
            args, kwargs = expected.example_inputs
            value = kwargs if i["keyword"] else args
            for key in i["keys"]:
                value = value[key]
            assert isinstance(value, torch.Tensor)


@pytest.mark.parametrize("name", CASES)
def test_one_more_input(name, tmp_path):
    case = CASES[name]()
    source, target = tmp_path / "model.pt2", tmp_path / "more.pt2"
    torch.export.save(export(case), source)
    expected = torch.export.load(source).module()
    tool_ok("append", source, target, "candidate_to_user")
    program = torch.export.load(target)
    args, kwargs = program.example_inputs
    assert len(args) + len(kwargs) == sum(map(len, torch.export.load(source).example_inputs)) + 1
    last = list(kwargs.values())[-1] if kwargs else args[-1]
    assert last.dtype == torch.int32 and last.tolist() == [0, 1, 2]
    torch._dynamo.reset()
    compiled = torch.compile(program.module(), backend="eager", dynamic=True)
    for batch in BATCHES:
        args, kwargs = case.call(batch)
        result = expected(*args, **kwargs)
        index = torch.zeros(batch, dtype=torch.int32)
        if kwargs:
            kwargs = {**kwargs, "candidate_to_user": index}
        else:
            args = (*args, index)
        assert torch.equal(program.module()(*args, **kwargs), result)
        assert torch.equal(compiled(*args, **kwargs), result)


def test_registered_containers(tmp_path):
    Pair = collections.namedtuple("Pair", ["left", "right"])
    torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="test_archive.Pair")

    @dataclasses.dataclass
    class Config:
        first: torch.Tensor
        second: torch.Tensor

    torch.export.register_dataclass(Config, serialized_type_name="test_archive.Config")

    class Model(nn.Module):
        def forward(self, pair, config):
            return pair.left + pair.right * config.first - config.second

    call = lambda b: (Pair(torch.randn(b), torch.randn(b)), Config(torch.randn(b), torch.randn(b)))  # noqa: E731
    dynamic = (Pair(BATCH, BATCH), [BATCH, BATCH])
    source, target = tmp_path / "model.pt2", tmp_path / "out.pt2"
    program = torch.export.export(Model(), call(3), dynamic_shapes=dynamic).run_decompositions({})
    program._example_inputs = None  # local classes cannot be pickled
    torch.export.save(program, source)
    inputs = json.loads(tool_ok("read", source))["inputs"]
    assert [i["path"] for i in inputs] == ["pair.left", "pair.right", "config.first", "config.second"]
    assert [i["name"] for i in inputs] == ["left", "right", "first", "second"]
    tool_ok("append", source, target, "index")
    args = call(5)
    result = torch.export.load(target).module()(*args, torch.zeros(5, dtype=torch.int32))
    assert torch.equal(result, Model()(*args))


def test_without_sample_inputs(tmp_path):
    case = tower_case()
    program = export(case)
    program._example_inputs = None
    source, target = tmp_path / "model.pt2", tmp_path / "out.pt2"
    torch.export.save(program, source)
    assert json.loads(tool_ok("read", source))["samples"] == []
    tool_ok("copy", source, target)
    expected, program = torch.export.load(source), torch.export.load(target)
    assert program.example_inputs == expected.example_inputs
    args, _ = case.call(4)
    assert torch.equal(program.module()(*args), expected.module()(*args))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol, tmp_path):
    case = CASES["keywords"]()
    source, target = tmp_path / "model.pt2", tmp_path / "out.pt2"
    program = export(case)
    torch.export.save(program, source, pickle_protocol=protocol)
    assert json.loads(tool_ok("read", source))["samples"] == [[3, 3]] * 4
    tool_ok("copy", source, target)
    assert_same_tree(torch.export.load(target).example_inputs, program.example_inputs)


def test_symbolic_integer_input(tmp_path):
    source, target = tmp_path / "model.pt2", tmp_path / "out.pt2"
    program = torch.export.export(Integers(), (torch.randn(3), 5), dynamic_shapes=(BATCH, torch.export.Dim.DYNAMIC))
    torch.export.save(program, source)
    assert [i["path"] for i in json.loads(tool_ok("read", source))["inputs"]] == ["x"]
    tool_ok("copy", source, target)
    x = torch.randn(4)
    assert torch.equal(torch.export.load(target).module()(x, 7), x * 7)


def test_extra_files(tmp_path):
    files = {"note.txt": "hello", "folder/ikbo.json": json.dumps({"ä": 1})}
    source, target = tmp_path / "model.pt2", tmp_path / "out.pt2"
    torch.export.save(export(tower_case()), source, extra_files=files)
    assert json.loads(tool_ok("read", source))["extra_files"] == files
    tool_ok("copy", source, target)
    back = dict.fromkeys(files, "")
    torch.export.load(target, extra_files=back)
    assert back == files


def rewrite(source, target, change):
    """Passes every member (name, bytes) through `change`; None drops it."""
    reader = torch._C.PyTorchFileReader(str(source))
    writer = torch._C.PyTorchFileWriter(str(target))
    writer.set_min_version(6)
    for name in reader.get_all_records():
        if name.startswith(".data/") or name == "byteorder":
            continue
        data = change(name, reader.get_record(name))
        if data is not None:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def test_without_node_metadata(tmp_path):
    source, stripped, target = (tmp_path / n for n in ("model.pt2", "stripped.pt2", "out.pt2"))
    case = tower_case()
    torch.export.save(export(case), source)

    def strip(name, data):
        if not name.startswith("models/"):
            return data
        model = json.loads(data)
        for node in model["graph_module"]["graph"]["nodes"]:
            node["metadata"] = {}
        return json.dumps(model).encode()

    rewrite(source, stripped, strip)
    tool_ok("copy", stripped, target)
    args, _ = case.call(4)
    assert torch.equal(torch.export.load(target).module()(*args), torch.export.load(source).module()(*args))


def test_overwriting_the_file_that_is_read(tmp_path):
    path = tmp_path / "model.pt2"
    case = CASES["tied"]()
    torch.export.save(export(case), path)
    expected = torch.export.load(path)
    for _ in range(2):
        tool_ok("copy", path, path)
    assert_same_program(torch.export.load(path), expected)
    assert os.listdir(tmp_path) == ["model.pt2"]


def test_through_a_link(tmp_path):
    case = tower_case()
    (tmp_path / "real").mkdir()
    torch.export.save(export(case), tmp_path / "real" / "model.pt2")
    (tmp_path / "link.pt2").symlink_to("real/model.pt2")
    tool_ok("copy", tmp_path / "link.pt2", tmp_path / "link.pt2")
    assert (tmp_path / "link.pt2").is_symlink()
    torch.export.load(tmp_path / "link.pt2")


def test_large_weights_are_streamed(tmp_path):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(600_000, 128)  # 293 MiB

        def forward(self, x):
            return self.table(x)

    source, target = tmp_path / "model.pt2", tmp_path / "out.pt2"
    model = Table()
    torch.export.save(torch.export.export(model, (ids(3),), dynamic_shapes=(BATCH,)), source)
    process = subprocess.Popen([TOOL, "copy", source, target])
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.002)
    assert process.returncode == 0
    # Pages of the mapped file are not counted: the system takes them back when it likes.
    assert peak < 200 * 1024, f"{peak} KiB of memory of its own for a table of {293 * 1024} KiB"
    assert tool_ok("check", target) == ""
    assert torch.equal(torch.export.load(target).state_dict["table.weight"], model.table.weight)


def test_flipped_bit_is_found(tmp_path):
    path = tmp_path / "model.pt2"
    case = tower_case()
    torch.export.save(export(case), path)
    data = bytearray(path.read_bytes())
    weight = case.model.linear.weight.detach().numpy().tobytes()
    data[data.index(weight) + 5] ^= 16
    path.write_bytes(data)
    torch.export.load(path)  # PyTorch does not notice
    done = tool("check", path)
    assert done.returncode == 1 and done.stdout.split() == ["data/weights/weight_1"]


def test_foreign_files(tmp_path):
    saved = tmp_path / "saved.pt"
    torch.save({"w": torch.ones(2)}, saved)
    assert "a file of torch.save" in refused(saved)
    legacy = tmp_path / "legacy.pt"
    torch.save({"w": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    assert "no zip" in refused(legacy)
    script = tmp_path / "script.pt"
    torch.jit.script(nn.Linear(2, 2)).save(str(script))
    assert "a TorchScript file" in refused(script)
    assert "a folder" in refused(tmp_path)
    assert "cannot be opened" in refused(tmp_path / "none.pt2")
    assert "a folder" in refused(tmp_path, "check")


def test_pickled_and_custom_objects(tmp_path):
    source = tmp_path / "model.pt2"
    torch.export.save(export(tower_case()), source)

    def pickled(name, data):
        if name != "data/weights/model_weights_config.json":
            return data
        config = json.loads(data)
        config["config"]["linear.weight"]["use_pickle"] = True
        return json.dumps(config).encode()

    changed = tmp_path / "pickled.pt2"
    rewrite(source, changed, pickled)
    assert "weight 'linear.weight': a pickled tensor subclass" in refused(changed)


def test_several_programs(tmp_path):
    program = export(tower_case())
    path = tmp_path / "two.pt2"
    torch.export.pt2_archive._package.package_pt2(str(path), exported_programs={"a": program, "b": program})
    assert "holds 2 exported programs (a, b)" in refused(path)
