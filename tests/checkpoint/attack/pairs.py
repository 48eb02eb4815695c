"""Two processes that save into one folder at once."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from random import Random

from attack.contents import Known
from attack.forked import Child, Outcome, Tell, call, fault, ok, shown
from attack.index_file import strays
from shardopt.checkpoint import CheckpointError

_known: list[Known] = []


def prepare(base: Path) -> None:
    """Makes contents, and a checkpoint of the first."""
    _known.append(Known(4))
    _known[-1].save(base / "previous", 0)


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Content 1 and content 2, into an empty folder or one with content 0; afterwards content 3."""
    rng = Random(f"pairs {seed} {number}")
    known, folder = _known[-1], base / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    if number % 2:
        shutil.copytree(base / "previous", folder)
    start = time.monotonic() + 0.05
    delays = [rng.choice([0, rng.uniform(0, 0.03)]) for _ in range(2)]
    asynchronously = [rng.random() < 0.3 for _ in range(2)]
    detail = f"delays {delays}, async {asynchronously}"

    def save(k: int, tell: Tell) -> None:
        time.sleep(max(start + delays[k - 1] - time.monotonic(), 0))
        try:
            known.save(folder, k, asynchronously=asynchronously[k - 1])
        except BaseException as error:
            tell([type(error).__name__, str(error)])
        else:
            tell(["saved", ""])

    children = [Child(lambda tell, k=k: save(k, tell)) for k in (1, 2)]  # type: ignore[misc]
    ends = [child.end()[0] for child in children]
    if None in ends:
        return fault("a save hung", detail)
    said = [child.told[0] if child.told else ["died", str(end)] for child, end in zip(children, ends, strict=True)]
    if wrong := [(kind, shown(text)) for kind, text in said if kind not in ("saved", CheckpointError.__name__)]:
        return fault(f"save: {wrong[0][0]}", f"{wrong}, {detail}")
    saved = [k for k, (kind, _) in enumerate(said, start=1) if kind == "saved"]
    if not saved:
        return fault("neither was saved", f"{shown(said)}, {detail}")
    outcome = call(lambda: _check(known, folder, saved))
    return outcome._replace(detail=f"{outcome.detail}, saved {saved}, {detail}")


def _check(known: Known, folder: Path, saved: list[int]) -> Outcome:
    try:
        k, extra = known.load(folder)
    except CheckpointError as error:
        return fault("no checkpoint is left", shown(str(error)))
    if k not in saved:
        return fault("another content than those saved", f"{k}, {shown(extra)}")
    known.save(folder, 3)
    if known.load(folder)[0] != 3:
        return fault("the next save is not what it was given")
    left = strays(folder)
    return fault("strays", shown(left)) if left else ok("both saved" if len(saved) == 2 else "one saved")
