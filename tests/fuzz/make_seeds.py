"""Exports the models of the archive tests into a folder, for the fuzzer to start from: make_seeds.py FOLDER"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import torch  # noqa: E402
from archive_cases import CASES  # noqa: E402


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in CASES.items():
        case = make()
        args, kwargs = case.call(3)
        program = torch.export.export(case.model.eval(), args, kwargs, dynamic_shapes=case.dynamic)
        path = folder / (name.replace(" ", "_") + ".pt2")
        torch.export.save(program.run_decompositions({}), path, extra_files={"note.txt": "text"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
