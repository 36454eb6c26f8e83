"""The arithmetic built for each instruction set, chosen as PyTorch chooses its own, on the threads of PyTorch's pool."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = """
import sys
import torch
from conftest import make_linear_case
import ikbo

print(torch.backends.cpu.get_cpu_capability())
for dtype, tolerance in [(torch.float64, 1e-14), (torch.float32, 4e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]:
    for activation in ["none", "relu", "sigmoid", "tanh", "silu", "gelu"]:
        for batch, k, n in [(101, 19, 65), (7, 300, 5), (50, 16, 130), (3, 1, 1)]:
            case = make_linear_case(batch, k, n, (4, 9), dtype=dtype, activation=activation)
            out, expected = case.run(), case.broadcast_form()
            assert ((out.double() - expected).abs() / expected.abs().clamp(min=1)).max() <= tolerance * 1.001
            for part in [torch.arange(1), torch.arange(batch // 2, batch), torch.randperm(batch)]:
                assert torch.equal(case.select(part).run(), out[part])
            strided = torch.randn(batch, 2 * k).to(dtype)[:, ::2]
            assert torch.equal(torch.ops.ikbo.linear(strided, *case.args[1:]),
                               torch.ops.ikbo.linear(strided.contiguous(), *case.args[1:]))
"""


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_instruction_set(capability):
    order = ["DEFAULT", "AVX2", "AVX512"]
    here = torch.backends.cpu.get_cpu_capability()
    if here not in order or order.index(capability.upper()) > order.index(here):
        pytest.skip(f"this machine offers {here}")
    folder = Path(__file__).resolve().parent
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    result = subprocess.run([sys.executable, "-c", CHECK], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == capability.upper()


# One thread makes the inputs; threads that are there afterwards are the operator's.
THREADS = """
import os
import sys
import torch
import ikbo

torch.set_num_threads(1)
index = torch.arange(400, dtype=torch.int32) % 40
rows, user, square = torch.randn(400, 256), torch.randn(40, 256), torch.randn(256, 256)
calls = {
    "broadcast": lambda: torch.ops.ikbo.broadcast(user, index),
    "linear": lambda: torch.ops.ikbo.linear(rows, square, [user], [square], [index]),
    "linear_compression": lambda: torch.ops.ikbo.linear_compression(
        square[:, :64], rows.view(400, 64, 4), [square[:, :64]], [user.view(40, 64, 4)], [index]),
    "target_attention": lambda: torch.ops.ikbo.target_attention(
        rows.view(400, 4, 1, 64), square.view(1, 256, 1, 256)[..., :64].expand(40, -1, -1, -1),
        square.view(1, 256, 1, 256)[..., 64:128].expand(40, -1, -1, -1), index),
    "self_and_target_attention": lambda: torch.ops.ikbo.self_and_target_attention(
        rows.view(40, 10, 4, 64), rows.view(400, 1, 4, 64), rows.view(40, 10, 4, 64), rows.view(40, 10, 4, 64), index),
}
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
calls[sys.argv[1]]()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    "operator", ["broadcast", "linear", "linear_compression", "target_attention", "self_and_target_attention"]
)
def test_every_operator_spreads_over_threads(operator):
    folder = Path(__file__).resolve().parent
    command = [sys.executable, "-c", "import conftest\n" + THREADS, operator]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == 2, "the operator ran on one thread"
