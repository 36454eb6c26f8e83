#!/usr/bin/env python3
"""Writes what a GPU machine's checks came to as one JSON file: tests passed, failed and skipped, by report.

usage: gpu_report.py REPORTS_FOLDER OUT.json SOURCE_DIGEST"""

import datetime
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import torch


def counts(paths):
    suites = [s for path in paths for s in xml.parse(path).getroot().iter("testsuite")]
    total = lambda key: sum(int(s.get(key) or 0) for s in suites)  # noqa: E731
    tests, failed = total("tests"), total("failures") + total("errors")
    skipped = total("skipped") + total("disabled")
    failures = [f"{c.get('classname')}.{c.get('name')}" for s in suites for c in s.iter("testcase")
                if c.find("failure") is not None or c.find("error") is not None]  # fmt: skip
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped, "failures": failures}


def main():
    reports, out, digest = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    # What several processes shared has a report each, NAME.0.xml and so on.
    names = sorted({path.name.split(".")[0] for path in reports.glob("*.xml")})
    found = {name: counts([*reports.glob(f"{name}.xml"), *reports.glob(f"{name}.*.xml")]) for name in names}
    if not found:
        return
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    content = {
        "gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "driver": driver.stdout.split()[0],
        "torch": torch.__version__, "cuda": torch.version.cuda, "date": datetime.date.today().isoformat(),
        "source_digest": digest, "reports": found,
    }  # fmt: skip
    out.write_text(json.dumps(content, indent=1) + "\n")
    for name, c in found.items():
        print(f"   {name:45s} {c['passed']:5d} passed, {c['failed']} failed, {c['skipped']} skipped")


if __name__ == "__main__":
    main()
