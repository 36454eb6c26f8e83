#!/usr/bin/env python3
"""Writes the warpgroup matrix multiplies beside this file, one for every N used, each with its operands spelt out, since
inline assembly has no register arrays. usage: generate_wgmma.py"""

import pathlib

# Form: file, how it is named, sizes N, whether a is in registers, whether a and b are MN-major.
FORMS = [
    ("wgmma_shapes.inc", "Wgmma", (64, 96, 128, 144, 152, 160, 176), False, 1, 0),
    ("wgmma_k_major.inc", "WgmmaKMajor", (80, 128), False, 0, 0),
    ("wgmma_registers.inc", "WgmmaRegisters", (64, 128, 256), True, 0, 1),
]


def wrapped(items, width):
    lines, line = [], ""
    for item in items:
        if len(line) + len(item) + 2 > width:
            lines.append(line.rstrip())
            line = ""
        line += item + ", "
    lines.append(line.rstrip().rstrip(","))
    return lines


def shape(name, n, registers, a_mn_major, b_mn_major):
    count = n // 2
    a_count = 4 if registers else 1
    macro = f"IKBO_{name.upper()}_{n}"
    text = [f"#define {macro}(TYPE)"]
    text += ["  asm volatile(", '      "{.reg .pred p; setp.ne.b32 p, %' + str(count + a_count + 1) + ', 0; "']
    text += [f'      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." TYPE "." TYPE " {{"']
    lines = wrapped([f"%{i}" for i in range(count)], 100)
    text += [f'      "{line}{"" if i + 1 == len(lines) else " "}"' for i, line in enumerate(lines)]
    if registers:
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        text += [f'      "}}, {a}, %{count + 4}, p, 1, 1, {b_mn_major};}}"']
    else:
        text += [f'      "}}, %{count}, %{count + 1}, p, 1, 1, {a_mn_major}, {b_mn_major};}}"']
    lines = wrapped([f'"+f"(d[{i}])' for i in range(count)], 108)
    text += [f'      {": " if i == 0 else "  "}{line}' for i, line in enumerate(lines)]
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if registers else '"l"(a)'
    text += [f'      : {inputs}, "l"(b), "r"(accumulate))']
    a_type = "const uint32_t (&a)[4]" if registers else "uint64_t a"
    body = " \\\n".join(text)
    return (
        body
        + f"""
template <typename T>
struct {name}<T, {n}> {{
  __device__ static void multiply(float (&d)[{count}], {a_type}, uint64_t b, int accumulate) {{
    if constexpr (std::is_same_v<T, __half>) {{
      {macro}("f16");
    }} else {{
      {macro}("bf16");
    }}
  }}
}};
#undef {macro}
"""
    )


def main():
    for file, name, sizes, *form in FORMS:
        head = "// Written by generate_wgmma.py; included by wgmma.h alone.\n// clang-format off\n"
        path = pathlib.Path(__file__).with_name(file)
        path.write_text(head + "\n".join(shape(name, n, *form) for n in sizes))


main()
