"""ikbo::aligned_cat: values and layout, gradients, shape rules, compilers, errors; linear compression over its result, whose
padding is never read; and where the transform emits it."""

import re

import pytest
import torch

import ikbo
from conftest import cpu_only, needs_inductor
from transform_checks import command, draw, export, is_user, replicate, roles, transform

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex128]
HALVES = [torch.bfloat16, torch.float16]
SHAPES = [  # of the pieces, dim
    ([(2, 3, 9), (2, 1, 9)], 1),
    ([(2, 3, 9), (2, 1, 9), (2, 0, 9)], -2),
    ([(5, 2, 16), (5, 7, 16)], 1),  # nothing to pad
    ([(4, 3, 255)], 1),
    ([(1, 1, 1), (1, 1, 1)], 1),
    ([(1, 1, 9)], 1),  # a single row: contiguous whatever its strides
    ([(1, 0, 3), (1, 1, 3)], 1),
    ([(1, 1, 1, 1)], 2),
    ([(3, 7), (2, 7)], 0),
    ([(2, 3, 4, 5), (2, 3, 1, 5)], 2),
    ([(2, 3, 4, 5), (6, 3, 4, 5)], 0),
    ([(2, 1, 2, 1, 3)] * 70, 1),  # more than CUDA takes in one launch
    ([(0, 3, 9), (0, 2, 9)], 1),
    ([(2, 3, 0), (2, 3, 0)], 1),
]
aligned_cat = torch.ops.ikbo.aligned_cat


def pieces(shapes, dtype=torch.float64):
    return [(torch.randn(*shape, dtype=torch.float64) * 50).to(dtype) for shape in shapes]


def aligned_strides(sizes, dtype):
    elements = 16 // dtype.itemsize
    strides = [1, (sizes[-1] + elements - 1) // elements * elements]
    for size in reversed(sizes[1:-1]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes,dim", SHAPES, ids=lambda v: str(v)[:40])
def test_a_concatenation_with_aligned_rows(shapes, dim, dtype):
    tensors = pieces(shapes, dtype)
    out, expected = aligned_cat(tensors, dim), torch.cat(tensors, dim)
    assert out.dtype == dtype and torch.equal(out, expected)
    assert out.data_ptr() % 16 == 0
    if out.numel():
        assert out.stride() == aligned_strides(out.shape, dtype)
        # the last row has its padding too: whoever reads 16 bytes at a time stays inside
        assert out.untyped_storage().nbytes() == out.stride(0) * out.shape[0] * dtype.itemsize
    assert out.is_contiguous() == (out.shape[-1] * dtype.itemsize % 16 == 0 or out.shape[:-1].numel() <= 1 or out.numel() == 0)
    assert torch.equal(ikbo.aligned_cat(tuple(tensors), dim), expected)
    assert all(out.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in tensors if t.numel())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_reads_any_strides(dtype):
    a, b, c = pieces([(4, 3, 9), (4, 9, 2), (1, 5, 9)], dtype)
    tensors = [a, b.transpose(1, 2), c.expand(4, 5, 9), a[:, ::2], a[..., :1].expand(4, 3, 9), a.flip(0)]
    out = aligned_cat(tensors, 1)
    assert torch.equal(out, torch.cat(tensors, 1)) and out.stride() == aligned_strides(out.shape, dtype)
    images = [t.to(memory_format=torch.channels_last) for t in pieces([(2, 3, 4, 5), (2, 6, 4, 5)], dtype)]
    out = aligned_cat(images, 1)
    assert torch.equal(out, torch.cat(images, 1)) and out.stride() == aligned_strides(out.shape, dtype)


# ---- Linear compression over such a stack ---------------------------------------------------------------------------


def poisoned_stack(tensors):
    """The concatenation, and NaN in the padding behind every row."""
    out = aligned_cat(tensors, 1)
    assert out.stride(1) != out.shape[2]
    rows = out.as_strided((out.shape[0] * out.shape[1], out.stride(1)), (out.stride(1), 1))
    rows[:, out.shape[2] :] = float("nan")
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("n", [1, 7, 9, 255])
@pytest.mark.parametrize("candidates,users", [(1, 1), (23, 4)])
def test_padding_is_never_read(dtype, n, candidates, users):
    m, k_cand, k_user = 19, (6, 5), (3, 10)
    e_cand = pieces([(candidates, k, n) for k in k_cand], dtype)
    e_user = pieces([(users, k, n) for k in k_user], dtype)
    w_cand, w_user = (torch.randn(m, sum(k)).to(dtype) for k in (k_cand, k_user))
    index = torch.randint(users, (candidates,), dtype=torch.int32)
    run = lambda e, u: torch.ops.ikbo.linear_compression(w_cand, e, [w_user], [u], [index])  # noqa: E731
    expected = run(torch.cat(e_cand, 1), torch.cat(e_user, 1))
    assert expected.isfinite().all()
    assert torch.equal(run(poisoned_stack(e_cand), poisoned_stack(e_user)), expected)
    assert torch.equal(run(poisoned_stack(e_cand), torch.cat(e_user, 1)), expected)
    for stack in (e_cand[:1], e_user[:1]):  # a single piece, and one row of it
        one = poisoned_stack([stack[0][:, :1]])
        weight = torch.randn(m, 1).to(dtype)
        assert torch.equal(
            torch.ops.ikbo.linear_compression(weight, one, [], [], []),
            torch.ops.ikbo.linear_compression(weight, stack[0][:, :1].contiguous(), [], [], []),
        )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_gradients_of_linear_compression_over_it(dtype):
    e_cand = [t.requires_grad_() for t in pieces([(9, 3, 7), (9, 4, 7)], dtype)]
    e_user = [t.requires_grad_() for t in pieces([(3, 2, 7), (3, 1, 7)], dtype)]
    w_cand, w_user = torch.randn(5, 7).to(dtype), torch.randn(5, 3).to(dtype)
    index = torch.randint(3, (9,), dtype=torch.int32)
    weights = torch.randn(9, 5, 7).to(dtype)

    def gradients(cat):
        out = torch.ops.ikbo.linear_compression(w_cand, cat(e_cand, 1), [w_user], [cat(e_user, 1)], [index])
        return torch.autograd.grad(out, [*e_cand, *e_user], weights)

    for ours, expected in zip(gradients(aligned_cat), gradients(torch.cat)):
        torch.testing.assert_close(ours, expected)


# ---- Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes,dim", [SHAPES[i] for i in (0, 1, 5, 8, 9)], ids=lambda v: str(v)[:40])
def test_gradcheck(shapes, dim):
    tensors = [t.requires_grad_() for t in pieces(shapes)]
    run = lambda *t: aligned_cat(list(t), dim)  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(lambda *t: run(*t).square(), tensors)


@pytest.mark.parametrize("which", range(3))
def test_every_piece_has_its_own_gradient(which):
    tensors = pieces([(2, 3, 5), (2, 1, 5), (2, 4, 5)])
    tensors[which].requires_grad_()
    weights = torch.randn(2, 8, 5, dtype=torch.float64)
    (aligned_cat(tensors, -2) * weights).sum().backward()
    assert torch.equal(tensors[which].grad, weights.split([3, 1, 4], 1)[which])
    assert all(t.grad is None for i, t in enumerate(tensors) if i != which)
    twice = torch.randn(2, 3, 5, requires_grad=True)
    aligned_cat([twice, twice], 1).sum().backward()
    assert (twice.grad == 2).all()


# ---- Shape rules and compilers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shapes,dim", [case for case in SHAPES if len(case[0]) < 10], ids=lambda v: str(v)[:40])
def test_opcheck(shapes, dim, dtype):
    tensors = pieces(shapes, dtype)
    torch.library.opcheck(aligned_cat.default, (tensors, dim))
    if dtype == torch.float64:
        torch.library.opcheck(aligned_cat.default, ([t.requires_grad_() for t in tensors], dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shape_rule_knows_the_strides(dtype):
    out = aligned_cat([torch.empty(3, k, 7, dtype=dtype, device="meta") for k in (2, 4)], 1)
    assert out.device.type == "meta" and out.dtype == dtype
    assert out.shape == (3, 6, 7) and out.stride() == aligned_strides(out.shape, dtype)


class Stack(torch.nn.Module):
    def forward(self, a, b):
        return ikbo.aligned_cat([a, b * 2, a], 1) + 1


def stack_inputs(batch, n, dtype=torch.float32):
    return [t.requires_grad_() for t in pieces([(batch, 3, n), (batch, 1, n)], dtype)]


@pytest.mark.parametrize("n", [9, 16])
def test_export_with_a_dynamic_batch(n, tmp_path):
    batch = torch.export.Dim("batch", min=0)
    program = torch.export.export(Stack(), tuple(stack_inputs(4, n)), dynamic_shapes=({0: batch},) * 2)
    torch.export.save(program.run_decompositions({}), tmp_path / "stack.pt2")
    loaded = torch.export.load(tmp_path / "stack.pt2")
    assert "ikbo.aligned_cat.default" in [str(node.target) for node in loaded.graph.nodes]
    for size in (4, 7, 1, 0):
        given = stack_inputs(size, n)
        assert torch.equal(loaded.module()(*given), Stack()(*given))


def test_compile_in_training():
    compiled = torch.compile(Stack(), dynamic=True, backend="aot_eager", fullgraph=True)
    for sizes in [(4, 9), (3, 8), (2, 30)]:
        given = stack_inputs(*sizes)
        assert torch.equal(compiled(*given), Stack()(*given))
        ours = torch.autograd.grad(compiled(*given).square().sum(), given)
        for a, b in zip(ours, torch.autograd.grad(Stack()(*given).square().sum(), given)):
            torch.testing.assert_close(a, b)


def test_compile_with_inductor():
    needs_inductor()
    compiled = torch.compile(Stack(), fullgraph=True)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            given = stack_inputs(4, 9, dtype)
            torch.testing.assert_close(compiled(*given), Stack()(*given))


# ---- Errors ---------------------------------------------------------------------------------------------------------

ERRORS = [
    (ValueError, "tensors is empty, expected at least one tensor", lambda a: ([], 1)),
    (ValueError, "tensors[0] has shape [3], expected two dimensions or more", lambda a: ([a[0, :, 0]], 0)),
    (ValueError, "dim is 3, expected -3 to 2", lambda a: ([a, a], 3)),
    (ValueError, "dim is -4, expected -3 to 2", lambda a: ([a, a], -4)),
    (ValueError, "dim is 2, the last one, along which rows lie, expected another", lambda a: ([a, a], 2)),
    (ValueError, "dim is -1, the last one, along which rows lie, expected another", lambda a: ([a, a], -1)),
    (ValueError, "tensors[1] has shape [2, 3, 4, 1], expected 3 dimensions, as tensors[0] has",
     lambda a: ([a, a[..., None]], 1)),
    (ValueError, "tensors[2] has size 3 in dimension 2, expected 4, that of tensors[0]", lambda a: ([a, a, a[..., 1:]], 1)),
    (ValueError, "tensors[1] has size 1 in dimension 0, expected 2, that of tensors[0]", lambda a: ([a, a[:1]], 1)),
    (TypeError, "tensors[1] has dtype Double, expected Float, the dtype of tensors[0]", lambda a: ([a, a.double()], 1)),
]  # fmt: skip


@pytest.mark.parametrize("error,message,arguments", ERRORS, ids=[e[1] for e in ERRORS])
@pytest.mark.parametrize("kind", ["plain", "grad", "meta"])
def test_errors(error, message, arguments, kind):
    tensors, dim = arguments(torch.randn(2, 3, 4, requires_grad=kind == "grad"))
    if kind == "meta":
        tensors = [t.to("meta") for t in tensors]
    with pytest.raises(error, match="^" + re.escape("ikbo::aligned_cat: " + message)):
        aligned_cat(tensors, dim)


def test_other_devices_and_layouts_are_refused():
    a = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=re.escape("ikbo::aligned_cat: tensors[1] is on meta, expected cpu")):
        aligned_cat([a.cpu(), a.to("meta")], 1)
    with pytest.raises((TypeError, NotImplementedError), match="ikbo::aligned_cat"):
        aligned_cat([a.to_sparse(), a.to_sparse()], 1)


def test_functorch_transforms_are_refused():
    with pytest.raises(NotImplementedError, match="ikbo::aligned_cat does not support torch.func transforms"):
        torch.func.grad(lambda x: aligned_cat([x, x], 1).sum())(torch.randn(2, 3, 4))


# ---- In transformed models ------------------------------------------------------------------------------------------

ROWS, K_USER, K_ITEM = 6, 5, 3


class Ranker(torch.nn.Module):
    """Stacks of both sides put together in the ways that models do, compressed with a bias and without."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.weight = torch.nn.Parameter(torch.randn(ROWS, K_USER + K_ITEM))
        self.narrow = torch.nn.Parameter(torch.randn(ROWS, K_USER - 1 + K_ITEM))
        self.linear = torch.nn.Linear(K_USER + K_ITEM, ROWS)

    def forward(self, x):
        return FORMS[self.form][0](self, x)


def sides(x):
    user = torch.cat([x["user_rows"], x["user_row"].unsqueeze(1)], 1)
    return user, torch.stack([x["item_row"], x["item_row"] * 2, x["item_other"]], 1)


def fields(x):
    user = x["user_rows"].unbind(1)
    return torch.stack([x["item_row"], *user, x["item_other"], x["user_row"], x["item_other"] * 2], 1)


# The model, and how many stacks have aligned rows.
FORMS = {
    "stacks of the sides": (lambda m, x: m.weight @ torch.cat(sides(x), 1), 2),
    "a bias": (lambda m, x: m.linear(torch.cat(sides(x), 1).transpose(1, 2)).transpose(1, 2), 2),
    "a bias beside a single piece": (
        lambda m, x: m.linear(torch.cat([x["item_rows"], x["user_rows"], x["user_row"].unsqueeze(1)], 1).mT),
        1,
    ),
    "fields": (lambda m, x: m.weight @ fields(x), 2),
    "fields after a pointwise operator": (lambda m, x: m.weight @ torch.relu(fields(x)), 2),
    "single pieces": (lambda m, x: m.narrow @ torch.cat([x["user_rows"], x["item_rows"]], 1), 0),
}


def example(n, dtype):
    shapes = {"user_rows": (K_USER - 1, n), "user_row": (n,), "item_rows": (K_ITEM, n), "item_row": (n,), "item_other": (n,)}
    return {name: torch.randn(8, *shape).to(dtype) for name, shape in shapes.items()}


class Used(dict):
    def __getitem__(self, name):
        self.read = getattr(self, "read", set()) | {name}
        return super().__getitem__(name)


def transformed(form, n, dtype, path):
    model = Ranker(form).to(dtype).eval()
    given = Used(example(n, dtype))
    model(given)
    given = {name: value for name, value in given.items() if name in given.read}
    export(model, given, path / "m.pt2")
    transform(path / "m.pt2", path / "m.ikbo.pt2")
    return model, given, path / "m.ikbo.pt2"


def assert_same_scores(module, model, given):
    for users, candidates in ((3, 7), (4, 4), (1, 1)):
        rows, index = draw(given, users, candidates), torch.randint(users, (candidates,), dtype=torch.int32)
        with torch.no_grad():
            exact = model.double()(replicate({k: v.double() for k, v in rows.items()}, index))
            out = module(rows, index)
        model.to(out.dtype)
        unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}[out.dtype]
        assert ((out.double() - exact).abs() / exact.abs().clamp(min=1)).max() <= 4 * unit


@cpu_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n,dtype", [(10, torch.bfloat16), (255, torch.float16)], ids=str)
def test_stacks_of_transformed_models_have_aligned_rows(form, n, dtype, tmp_path):
    model, given, path = transformed(form, n, dtype, tmp_path)
    operators = roles(path).values()
    stacks = [o for o in operators if o["target"] == "torch.ops.ikbo.aligned_cat.default"]
    assert len(stacks) == FORMS[form][1], [o["target"] for o in operators]
    assert sum(o["target"] == "torch.ops.ikbo.linear_compression.default" for o in operators) == 1
    assert {o["role"] for o in stacks} <= {"request-only", "candidate"}, stacks
    assert not any(o["target"].startswith("torch.ops.aten.cat") for o in operators)  # nothing is written twice
    program = torch.export.load(path)
    for node in program.graph.nodes:
        if str(node.target) == "ikbo.aligned_cat.default":
            tensor = node.meta["val"]
            assert tensor.stride()[1:] == aligned_strides((4, *tensor.shape[1:]), dtype)[1:]
            assert tensor.stride()[0] == tensor.shape[1] * tensor.stride()[1]
    assert_same_scores(program.module(), model, given)
    torch.export.save(program, tmp_path / "again.pt2")
    assert_same_scores(torch.export.load(tmp_path / "again.pt2").module(), model, given)


@cpu_only
def test_transformed_models_compile(tmp_path):
    model, given, path = transformed("a bias", 10, torch.bfloat16, tmp_path)
    module = torch.export.load(path).module()
    assert_same_scores(torch.compile(module, dynamic=True, backend="aot_eager"), model, given)
    assert_same_scores(torch.export.load(path).run_decompositions({}).module(), model, given)


@cpu_only
@pytest.mark.parametrize("n,dtype", [(16, torch.bfloat16), (8, torch.float16), (10, torch.float32)], ids=str)
def test_other_stacks_stay_as_they_are(n, dtype, tmp_path):
    model, given, path = transformed("stacks of the sides", n, dtype, tmp_path)
    targets = [o["target"] for o in roles(path).values()]
    assert "torch.ops.ikbo.linear_compression.default" in targets
    assert not any("aligned_cat" in target for target in targets)
    assert_same_scores(torch.export.load(path).module(), model, given)


@cpu_only
def test_the_command_verifies_and_runs_them(tmp_path):
    _, given, path = transformed("a bias", 10, torch.bfloat16, tmp_path)
    assert any(is_user(name) for name in given)
    result = command("verify", tmp_path / "m.pt2", path)
    assert result.returncode == 0, result.stdout + result.stderr
