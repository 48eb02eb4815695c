"""Tries a GPU in a quarter of an hour: one command, the most valuable findings first.

launch/gpu_first.sh [--only SECTION ...] [--seconds 490] [--fake]

Each section is a process, so that a crash, a hang or a broken CUDA context ends that section alone. A section writes
each finding at once to a file of its own; this process merges the files into $OUT/first.json twice a second.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from gpu.common import BROKEN, CARRIED, ROOT, die_with_parent
from gpu.predictions import PREDICTIONS, measured, text_of


class Section(NamedTuple):
    """A part of the check, its module, the most seconds that it takes, and how many processes run side by side."""

    name: str
    module: str
    seconds: float
    processes: int = 1


WORKERS = min(6, (os.cpu_count() or 2) // 2 + 1)
#: In the order of what they are worth; `tests` goes on at the end where it stopped.
SECTIONS = (
    Section("facts", "facts", 15),
    Section("smoke", "facts", 30),
    Section("numbers", "facts", 15),
    Section("races", "speed", 40),
    Section("tests", "cases", 80, WORKERS),
    Section("others", "speed", 100),
    Section("fsdp", "training", 30),
    Section("training", "training", 40),
    Section("offload", "tools", 40),
    Section("ncu", "tools", 60),
    Section("sanitizer", "tools", 70),
    Section("tests", "cases", 200, WORKERS),
)
#: Sections that fail on purpose, for tests of this flow.
PLANTED = tuple(
    Section(name, "planted", 0.3 if name == "hang" else 10) for name in ("crash", "hang", "broken", "raising")
)
AHEAD = 2 if (os.cpu_count() or 2) < 8 else 14  # sections whose processes have started
GRACE = 3  # seconds behind a section's end until it is killed
PATIENCE = 60  # seconds at most until a section's processes have started
SLACK = 10  # times as long may all of these take where the CPU stands in for a GPU


class Child:
    """A process of a section."""

    def __init__(self, section: Section, part: int, work: Path, env: dict[str, str]) -> None:
        self.label = section.name if section.processes == 1 else f"{section.name}.{part}"
        self._file, self.log = work / f"{self.label}.json", work / f"{self.label}.log"
        self._command = [sys.executable, "-u", "-m", "gpu.section", section.module, section.name]
        self._command += [str(part), str(section.processes), str(self._file)]
        self._work, self._env, self._turns = work, env, 0
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._work,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def go(self, seconds: float) -> None:
        """Gives the process a turn."""
        self._turns += 1
        self._end = time.monotonic() + seconds
        if self._process.poll() is not None:
            self._start()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{seconds:.1f}\n".encode())
            self._process.stdin.flush()

    def found(self) -> dict[str, Any]:
        """Findings that the process has written so far."""
        try:
            return dict(json.loads(self._file.read_text()))
        except FileNotFoundError:
            return {}

    def is_ready(self) -> bool:
        """Whether the process has imported what it needs, or has died."""
        return bool(self.found().get("ready")) or self._process.poll() is not None

    def has_ended(self) -> bool:
        """Whether the turn is over; a process whose case broke the context goes on behind that case."""
        status = self._process.poll()
        if self.found().get("turns", 0) >= self._turns:
            return True
        if status is None:
            return False
        rest = self._end - time.monotonic()
        if self.label.startswith("tests") and rest > 15:
            self._turns -= 1
            self.go(rest)
            return False
        return True

    def outcome(self) -> str:
        """How the turn ended."""
        status = self._process.poll()
        found = self.found()
        if found.get("turns", 0) >= self._turns:
            return "raised an error" if "error" in found else "ended"
        if status is None:
            return "did not end in time"
        return "broke its CUDA context" if status == BROKEN else f"died with status {status}"

    def kill(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> int:
    """Runs the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(section.name for section in SECTIONS + PLANTED))
    parser.add_argument("--only", nargs="+", choices=names, default=[section.name for section in SECTIONS])
    parser.add_argument("--seconds", type=float, default=490, help="for everything (default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help=f"try the flow on the CPU, with {SLACK} times the seconds")
    args = parser.parse_args()
    slack = SLACK if args.fake else 1
    begin = time.monotonic()
    end = begin + slack * args.seconds - GRACE
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu_first_out"))
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu_first"))
    found: dict[str, Any] = {"began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), "fake": args.fake}
    found |= {"predictions": {name: each._asdict() for name, each in PREDICTIONS.items()}}
    found |= {"times": {}, "outcomes": {}, "sections": {}}

    def flush() -> None:
        partial = out / "first.json.part"
        partial.write_text(json.dumps(found, indent=1))
        partial.replace(out / "first.json")

    flush()
    env = prepare(work, args.fake, found, end - 120)
    flush()
    chosen = [section for section in (*SECTIONS, *PLANTED) if section.name in args.only]
    children: dict[str, list[Child]] = {}

    def stop() -> None:
        for child in itertools.chain(*children.values()):
            child.kill()

    signal.signal(signal.SIGTERM, lambda *_: (stop(), sys.exit(143)))
    for place, section in enumerate(chosen):
        for soon in chosen[place : place + AHEAD]:  # import while others have their turn
            if soon.name not in children:
                children[soon.name] = [Child(soon, part, work, env) for part in range(soon.processes)]
        same = children[section.name]
        patience = min(end, time.monotonic() + PATIENCE * slack)
        while not all(child.is_ready() for child in same) and time.monotonic() < patience:
            time.sleep(0.05)
        seconds = min(section.seconds * slack, end - time.monotonic())
        if seconds < 2:
            found["outcomes"].setdefault(section.name, []).append("left out: no time left")
            continue
        started = time.monotonic()
        for child in same:
            child.go(seconds)
        over = False
        while not over:
            time.sleep(0.5)
            ended = [child.has_ended() for child in same]  # asks each, which may start it again
            over = all(ended) or time.monotonic() - started > seconds + GRACE
            found["sections"][section.name] = [child.found() for child in same]
            flush()
        outcomes = {child.outcome() for child in same}
        for child in same:
            if child.outcome() != "ended":
                child.kill()
        took = round(time.monotonic() - started, 1)
        found["times"].setdefault(section.name, []).append(took)
        found["outcomes"].setdefault(section.name, []).append("; ".join(sorted(outcomes)))
        flush()
        print(f"[{time.monotonic() - begin:6.1f}] {section.name}: {took} s, {found['outcomes'][section.name][-1]}")
        for line in lines_of(found, section.name):
            print(f"    {line}"[:500], flush=True)
    stop()
    logs = (child.log for child in itertools.chain(*children.values()))
    texts = (f"== {log.stem}\n{log.read_text(errors='replace')[-20000:]}" for log in logs)
    (out / "first.log").write_text("\n".join(texts))
    found["seconds"] = round(time.monotonic() - begin, 1)
    flush()
    print(f"results: {out}")
    return 0


def prepare(work: Path, fake: bool, found: dict[str, Any], end: float) -> dict[str, str]:
    """Installs what was carried, and builds here if that does not load; returns the sections' environment."""
    site = work / "site"
    site.mkdir()
    folders = ("benchmarks", "launch", "tests/support", "tests/checkpoint")
    paths = [str(site), *(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env.setdefault("OMP_NUM_THREADS", "2")
    if fake:
        return env | {"GPU_FIRST_FAKE": "1"}
    for wheel in CARRIED.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    found["carried"] = {path.name: path.stat().st_size for path in CARRIED.glob("*")}
    check = [sys.executable, "-c", "from shardopt import _C; assert _C.with_cuda and _C.cuda_device_count()"]
    loaded = subprocess.run(check, env=env, cwd=work, capture_output=True, text=True)
    found["import"] = loaded.stderr[-2000:] or "loads, and sees a device"
    if loaded.returncode:
        options = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--upgrade", "--target"]
        here = {**env, "SHARDOPT_CUDA": "1", "SHARDOPT_CUDA_ARCHS": "90"}
        command = [sys.executable, *options, str(site), str(ROOT)]
        limit = max(end - time.monotonic(), 30)
        try:
            built = subprocess.run(command, env=here, cwd=work, capture_output=True, text=True, timeout=limit)
            found["build"] = f"status {built.returncode}: {(built.stdout + built.stderr)[-3000:]}"
        except subprocess.TimeoutExpired:
            found["build"] = f"not finished in {limit:.0f} s"
    return env


def lines_of(found: dict[str, Any], section: str) -> list[str]:
    """Findings of a section, a line each: races beside their predictions; cases of tests are summed up."""
    processes = found["sections"][section]
    if section == "tests":
        sums = [f"{sum(each.get(key, 0) for each in processes)} {key}" for key in ("passed", "failed", "skipped")]
        failures = [failure for each in processes for failure in each.get("failures", [])]
        ends = [failure["error"].splitlines()[-1:] for failure in failures]
        return [", ".join(sums), *(f"FAILED {f['case']}: {end}" for f, end in zip(failures[:12], ends, strict=False))]
    raced = list(measured({"sections": {section: processes}}))
    plain = {
        key: {k: v for k, v in value.items() if not isinstance(v, dict)} if raced and isinstance(value, dict) else value
        for key, value in processes[0].items() if key not in ("ready", "turns")
    }  # fmt: skip
    return [f"{key}: {json.dumps(value)}" for key, value in plain.items()] + [text_of(*each) for each in raced]


if __name__ == "__main__":
    sys.exit(main())
