"""Random programs over the rule families: exported, transformed in every mode, compared with the original in C++.

IKBO_RANDOM_PROGRAMS sets how many (250 in scripts/test.sh); IKBO_PROGRAM_SEED which ones. For a long run,
IKBO_PROGRAM_FOLDER keeps what is exported, so that it can be taken up again, and IKBO_PROGRAM_RESULT is the file that
the outcome is written to (bench/results/cpu/zoo_random.json).
"""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("IKBO_RANDOM_PROGRAMS", "40"))


def checker():
    named = os.environ.get("IKBO_CHECK_PROGRAMS")
    places = [Path(named)] if named else [ROOT / "build/tests/tests/transform/ikbo_check_programs"]
    for place in places:
        if place.exists():
            return str(place)
    pytest.skip("ikbo_check_programs is not built: cmake --preset tests && cmake --build --preset tests")


def refused(text):
    """Programs that spread one user's row over candidates, in a way that would mix those of several users."""
    return sum(int(words[1]) for words in map(str.split, text.splitlines()) if words[:1] == ["refused"])


def record(text, seed, file):
    """The outcome, in the form of the other files of results: what the checker printed, and the sources it was built of."""
    words = text.splitlines()[-1].split()
    digest = subprocess.run([ROOT / "scripts/source_digest.sh", "zoo_random"], capture_output=True, text=True, check=True)
    content = {"date": datetime.date.today().isoformat(), "source_digest": digest.stdout.strip(), "seed": seed}
    content |= dict(zip(("programs", "comparisons", "wrong", "failed"), (int(words[i]) for i in (0, 2, 4, 6))))
    content["refused"] = refused(text)
    content["with"] = {w[1]: int(w[2]) for w in map(str.split, text.splitlines()) if w[:1] == ["with"] and len(w) == 3}
    file.write_text(json.dumps(content, indent=1) + "\n")


def test_random_programs_keep_their_meaning(tmp_path):
    check = checker()
    seed = os.environ.get("IKBO_PROGRAM_SEED", "1")
    folder = os.environ.get("IKBO_PROGRAM_FOLDER", str(tmp_path))
    maker = [sys.executable, str(ROOT / "tests/transform/random_programs.py"), folder]
    subprocess.run([*maker, "--count", str(COUNT), "--seed", seed], check=True)
    result = subprocess.run([check, folder], capture_output=True, text=True)
    print(result.stdout)
    if "IKBO_PROGRAM_RESULT" in os.environ:
        record(result.stdout, int(seed), Path(os.environ["IKBO_PROGRAM_RESULT"]))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    summary = result.stdout.splitlines()[-1]
    compared = COUNT - refused(result.stdout)
    assert summary.startswith(f"{COUNT} programs, {compared * 12} comparisons, 0 wrong, 0 failed"), summary
    assert compared > 0.9 * COUNT, "most programs should go through"
    features = {words[1]: int(words[2]) for words in map(str.split, result.stdout.splitlines()) if words[:1] == ["with"] and len(words) == 3}
    for name in ("linear", "linear_compression", "target_attention"):
        assert features[f"ikbo::{name}"] >= COUNT // 40, f"the programs hardly exercise ikbo::{name}: {features}"
