"""Shape rules and compilers: opcheck, torch.export with dynamic sizes, torch.compile."""

import io

import pytest
import torch
from torch.export import Dim

import ikbo  # noqa: F401  registers the operators
from conftest import needs_inductor

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def opcheck(operator, *args):
    torch.library.opcheck(operator, args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch,users", [(5, 3), (4, 4), (0, 2), (1, 1), (0, 0)])
def test_opcheck_broadcast(dtype, batch, users):
    index = torch.randint(users, (batch,), dtype=torch.int32) if users else torch.zeros(0, dtype=torch.int32)
    for row in ((), (3,), (2, 4)):
        x = torch.randn(users, *row).to(dtype)
        opcheck(torch.ops.ikbo.broadcast.default, x, index)
        opcheck(torch.ops.ikbo.broadcast.default, x.requires_grad_(), index)
        grad = torch.randn(batch, *row).to(dtype)
        opcheck(torch.ops.ikbo.broadcast_backward.default, grad, index, users)
        opcheck(torch.ops.ikbo.broadcast_backward.default, grad.requires_grad_(), index, users)


def test_opcheck_broadcast_of_strided_and_integer_rows():
    index = torch.tensor([1, 0, 1], dtype=torch.int32)
    opcheck(torch.ops.ikbo.broadcast.default, torch.randn(5, 2).t(), index)
    opcheck(torch.ops.ikbo.broadcast.default, torch.randn(1, 4).expand(2, 4), index)
    opcheck(torch.ops.ikbo.broadcast.default, torch.arange(6).reshape(2, 3), index)


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "tanh", "silu", "gelu"])
@pytest.mark.parametrize(
    "batch,k,n,users", [(5, 3, 4, (2,)), (4, 4, 4, (4, 4)), (0, 3, 2, (1,)), (1, 0, 1, (1,)), (3, 2, 5, ())], ids=str
)
def test_opcheck_linear(linear_case, activation, batch, k, n, users):
    for dtype in (torch.float32, torch.float64):
        case = linear_case(batch, k, n, users, dtype=dtype, activation=activation, bias=batch != 4)
        opcheck(torch.ops.ikbo.linear.default, *case.args)
        opcheck(torch.ops.ikbo.linear.default, *case.requires_grad().args)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("wanted", ["all", "some", "none"])
def test_opcheck_linear_backward(linear_case, activation, wanted):
    case = linear_case(5, 3, 4, (2, 6), activation=activation)
    mask = {"all": [True] * 7, "some": [False, True, True, False, True, True, False], "none": [False] * 7}[wanted]
    output = case.run() if activation == "relu" else None
    grad = torch.randn(5, 4, dtype=torch.float64)
    opcheck(torch.ops.ikbo.linear_backward.default, grad, output, *case.args, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opcheck_linear_16_bit(linear_case, dtype):
    opcheck(torch.ops.ikbo.linear.default, *linear_case(5, 3, 4, (2,), dtype=dtype, activation="silu").args)


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user = torch.nn.Parameter(torch.randn(8, 5))
        self.candidate = torch.nn.Parameter(torch.randn(8, 3))
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x_user, x_cand, candidate_to_user):
        hidden = ikbo.linear(
            x_cand, self.candidate, [x_user], [self.user], [candidate_to_user], self.bias, activation="gelu"
        )
        return hidden.sum(1) + ikbo.broadcast(x_user * 2, candidate_to_user)[:, 0]


def inputs(users, candidates):
    index = torch.randint(users, (candidates,), dtype=torch.int32) if users else torch.zeros(0, dtype=torch.int32)
    return torch.randn(users, 5), torch.randn(candidates, 3), index


SIZES = [(4, 9), (9, 4), (6, 6), (1, 1), (1, 50), (3, 0)]


@pytest.mark.parametrize("example", [(4, 9), (5, 5)], ids=["different example sizes", "equal example sizes"])
def test_export_with_two_batch_sizes(example):
    model = Tower().eval()
    users, candidates = Dim("users", min=1), Dim("candidates", min=0)
    program = torch.export.export(
        model, inputs(*example), dynamic_shapes={"x_user": {0: users}, "x_cand": {0: candidates},
                                                 "candidate_to_user": {0: candidates}}
    )
    targets = [str(node.target) for node in program.run_decompositions({}).graph.nodes]
    assert "ikbo.linear.default" in targets and "ikbo.broadcast.default" in targets
    archive = io.BytesIO()
    torch.export.save(program, archive)
    archive.seek(0)
    loaded = torch.export.load(archive).module()
    for sizes in SIZES:
        given = inputs(*sizes)
        assert torch.equal(loaded(*given), model(*given))


def test_export_with_sizes_that_depend_on_data():
    """Sizes without a value (unbacked): the rows that a mask keeps."""

    class Kept(torch.nn.Module):
        def forward(self, x_user, index, keep, w):
            kept = index[keep]
            rows = torch.ops.ikbo.broadcast(x_user, kept)
            return torch.ops.ikbo.linear(rows, w, [x_user], [w], [kept]) + 1

    given = (torch.randn(3, 4), torch.randint(3, (8,), dtype=torch.int32), torch.rand(8) > 0.4, torch.randn(2, 4))
    batch = Dim("batch")
    program = torch.export.export(
        Kept(), given, dynamic_shapes={"x_user": {0: Dim("users")}, "index": {0: batch}, "keep": {0: batch}, "w": None}
    )
    for count in (8, 20):
        other = (torch.randn(5, 4), torch.randint(5, (count,), dtype=torch.int32), torch.rand(count) > 0.5, given[3])
        torch.testing.assert_close(program.module()(*other), Kept()(*other))


def test_export_ties_the_batch_of_index_and_candidates():
    """Two batch sizes that must be equal cannot be exported as independent ones."""
    model = Tower()
    dynamic = {"x_user": {0: Dim("u")}, "x_cand": {0: Dim("a")}, "candidate_to_user": {0: Dim("b")}}
    with pytest.raises(Exception, match="Constraints violated|a = b|b = a"):
        torch.export.export(model, inputs(4, 9), dynamic_shapes=dynamic)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_compile_with_dynamic_sizes(mode):
    model = Tower()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for sizes in SIZES[:5]:
        given = inputs(*sizes)
        if mode == "inference":
            with torch.no_grad():
                torch.testing.assert_close(compiled(*given), model(*given))
            continue
        leaves = [*model.parameters(), given[0].requires_grad_(), given[1].requires_grad_()]
        ours = torch.autograd.grad(compiled(*given).square().sum(), leaves)
        expected = torch.autograd.grad(model(*given).square().sum(), leaves)
        for a, b in zip(ours, expected):
            torch.testing.assert_close(a, b)


def test_compile_with_inductor():
    needs_inductor()
    model = Tower().eval()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for sizes in ((4, 9), (7, 3)):
            given = inputs(*sizes)
            torch.testing.assert_close(compiled(*given), model(*given))


def test_shape_rules_never_look_at_values():
    """On meta tensors an index has no values; the result still has the right shape, type and device."""
    out = torch.ops.ikbo.broadcast(torch.empty(3, 5, 7, device="meta"), torch.empty(9, dtype=torch.int32, device="meta"))
    assert out.shape == (9, 5, 7) and out.device.type == "meta" and out.is_contiguous()
    x, w = torch.empty(9, 4, device="meta", dtype=torch.half), torch.empty(2, 4, device="meta", dtype=torch.half)
    index = torch.empty(9, dtype=torch.int32, device="meta")
    out = torch.ops.ikbo.linear(x, w, [x[:3]], [w], [index], None, "relu")
    assert out.shape == (9, 2) and out.dtype == torch.half
