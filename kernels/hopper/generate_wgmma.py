#!/usr/bin/env python3
"""Writes wgmma_shapes.inc beside this file: one warpgroup matrix multiply for every N used, each with its operands
spelt out, since inline assembly has no register arrays. usage: generate_wgmma.py N ..."""

import pathlib
import sys


def wrapped(items, width):
    lines, line = [], ""
    for item in items:
        if len(line) + len(item) + 2 > width:
            lines.append(line.rstrip())
            line = ""
        line += item + ", "
    lines.append(line.rstrip().rstrip(","))
    return lines


def shape(n):
    count = n // 2
    text = [f"#define IKBO_WGMMA_{n}(TYPE)"]
    text += ["  asm volatile(", '      "{.reg .pred p; setp.ne.b32 p, %' + str(count + 2) + ', 0; "']
    text += [f'      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." TYPE "." TYPE " {{"']
    lines = wrapped([f"%{i}" for i in range(count)], 100)
    text += [f'      "{line}{"" if i + 1 == len(lines) else " "}"' for i, line in enumerate(lines)]
    text += [f'      "}}, %{count}, %{count + 1}, p, 1, 1, 1, 0;}}"']
    lines = wrapped([f'"+f"(d[{i}])' for i in range(count)], 108)
    text += [f'      {": " if i == 0 else "  "}{line}' for i, line in enumerate(lines)]
    text += ['      : "l"(a), "l"(b), "r"(accumulate))']
    body = " \\\n".join(text)
    return (
        body
        + f"""
template <typename T>
struct Wgmma<T, {n}> {{
  __device__ static void multiply(float (&d)[{count}], uint64_t a, uint64_t b, int accumulate) {{
    if constexpr (std::is_same_v<T, __half>) {{
      IKBO_WGMMA_{n}("f16");
    }} else {{
      IKBO_WGMMA_{n}("bf16");
    }}
  }}
}};
#undef IKBO_WGMMA_{n}
"""
    )


def main():
    sizes = [int(argument) for argument in sys.argv[1:]]
    assert sizes and all(n % 8 == 0 and 8 <= n <= 256 for n in sizes), "usage: generate_wgmma.py N ..."
    head = "// Written by generate_wgmma.py " + " ".join(sys.argv[1:]) + "; included by wgmma.h alone.\n// clang-format off\n"
    path = pathlib.Path(__file__).with_name("wgmma_shapes.inc")
    path.write_text(head + "\n".join(shape(n) for n in sizes))


main()
