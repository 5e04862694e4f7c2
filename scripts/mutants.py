"""Break the planner in named ways; every break must be noticed.

    python scripts/mutants.py [--only NAME] [--pairs N]

Each mutant is one small edit of one file, made in a copy of the source. It dies when the oracle
disagrees within `--pairs` random pairs, or else when a unit test of the planner fails. A mutant
that lives shows a hole in the tests, and makes this script fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240  # for one mutant
TESTS = [
    "test_tokens.py",
    "test_plan.py",
    "test_layout.py",
    "test_peer_layouts.py",
    "test_refusals.py",
    "test_topology.py",
]

SWEEP = """
import sys
from kvferry.verify.sweep import check
for index in range(int(sys.argv[1])):
    result = check(3, index)
    if result.mismatch:
        sys.exit(f"pair {index}: {result.mismatch.splitlines()[-1][:100]}")
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # under src/kvferry
    old: str
    new: str


MUTANTS = [
    # how shapes cut
    Mutant(
        "heads off by one",
        "layout/shape.py",
        "return Span(part * units // parts, (part + 1) * units // parts)",
        "return Span(part * units // parts, max(1, (part + 1) * units // parts - (part == 0)))",
    ),
    Mutant(
        "replicas in turn", "layout/shape.py", "held = part * units // parts", "held = part % units"
    ),
    Mutant(
        "remainder to the last stage",
        "layout/shape.py",
        "counts[-2 - i] += 1",
        "counts[-1 - i] += 1",
    ),
    Mutant(
        "draft on the first stage",
        "layout/shape.py",
        "if pp_rank == self.pp - 1 else ()",
        "if pp_rank == 0 else ()",
    ),
    Mutant(
        "draft's own tp forgotten",
        "layout/shape.py",
        "return dict(self.role_tp).get(group.role, self.tp)",
        "return self.tp",
    ),
    Mutant(
        "one kernel block size for all groups",
        "layout/shape.py",
        "kernel = sizes.get(group.name, self.kernel_block_size) or tokens",
        "kernel = self.kernel_block_size or tokens",
    ),
    # where ranks keep it
    Mutant(
        "value plane after its slots",
        "layout/interior.py",
        "_content(v, k_plane, slot=v.unit_bytes)",
        "_content(v, v.unit_bytes, slot=v.unit_bytes)",
    ),
    Mutant(
        "convolution rows and channels swapped",
        "layout/interior.py",
        'channel = rows * c.element_bytes if q.conv_order == "DS" else c.element_bytes',
        'channel = rows * c.element_bytes if q.conv_order == "SD" else c.element_bytes',
    ),
    Mutant(
        "planes in the other order",
        "layout/interior.py",
        "slot, unit = (outer, inner) if q.token_major else (inner, outer)",
        "slot, unit = (inner, outer) if q.token_major else (outer, inner)",
    ),
    Mutant(
        "pages not padded",
        "layout/placement.py",
        "if index == outer - 1 and target != page:",
        "if index == outer and target != page:",
    ),
    Mutant(
        "kernel blocks not told apart",
        "layout/placement.py",
        "tile_stride=place.tile_stride or kernel_block_stride,",
        "tile_stride=(place.tile_slots or kernel) * (place.slot_stride or slot_stride),",
    ),
    Mutant(
        "all layers in the first one's region",
        "layout/tensors.py",
        "regions=np.asarray([v.region for v in views], dtype=np.int64)",
        "regions=np.asarray([first.region for v in views], dtype=np.int64)",
    ),
    Mutant(
        "one block table for a group",
        "layout/tensors.py",
        "parts.append(replace(part, table=table, pool=pools[table]))",
        "parts.append(replace(part, table=min(pools), pool=pools[table]))",
    ),
    # tokens
    Mutant(
        "interleave forgotten",
        "plan/tokens.py",
        "positions // self.interleave % self.context == self.context_rank",
        "positions % self.context == self.context_rank",
    ),
    Mutant(
        "interleaved slots too dense",
        "plan/tokens.py",
        "return chunk * self.interleave + positions % self.interleave",
        "return chunk + positions % self.interleave",
    ),
    Mutant(
        "ring turned by one",
        "plan/tokens.py",
        "return positions % self.block_entries",
        "return (positions + 1) % self.block_entries",
    ),
    Mutant(
        "window not in whole blocks",
        "plan/tokens.py",
        "return token // span * span",
        "return token",
    ),
    Mutant(
        "prefix not skipped",
        "plan/tokens.py",
        "wanted = max(skip, _block_floor(group, dst, needed))",
        "wanted = _block_floor(group, dst, needed)",
    ),
    Mutant(
        "destination's blocks not cut",
        "plan/tokens.py",
        "_between([src.step, dst.step], body)",
        "_between([src.step], body)",
    ),
    Mutant(
        "tiles of one side only",
        "plan/tokens.py",
        "tiles = lcm(src.tile, dst.tile)",
        "tiles = src.tile",
    ),
    Mutant(
        "tiles that do not divide",
        "plan/tokens.py",
        "if tiles not in (src.tile, dst.tile):",
        "if tiles < 0:",
    ),
    Mutant(
        "folding over a change of distance",
        "plan/tokens.py",
        "first[2:] |= linked[1:] & linked[:-1] & ~steady",
        "first[2:] |= False",
    ),
    Mutant(
        "local count runs over",
        "plan/tokens.py",
        "min(max(rest, 0), self.interleave)",
        "max(rest, 0)",
    ),
    # runs
    Mutant(
        "swallowing on one side",
        "plan/pieces.py",
        "if axis.src_stride == axis.dst_stride == length:",
        "if axis.src_stride == length:",
    ),
    Mutant(
        "fusing on one side",
        "plan/pieces.py",
        "            and last.dst_offset + last.length == box.dst_offset\n",
        "",
    ),
    Mutant(
        "refined stride not scaled",
        "plan/pieces.py",
        "ours.append((a // step, a_stride * step))",
        "ours.append((a // step, a_stride))",
    ),
    Mutant(
        "axes merged on one side",
        "plan/pieces.py",
        "                and axis.dst_stride == inner.dst_stride * inner.times\n",
        "",
    ),
    Mutant(
        "source strides on both sides",
        "plan/pieces.py",
        'stride = axis.src_stride if side == "src" else axis.dst_stride',
        "stride = axis.src_stride",
    ),
    # edges
    Mutant(
        "first head of the source",
        "plan/edge.py",
        "src_offset=a_shift + (units.start - pa.units.start) * pa.unit_stride,",
        "src_offset=a_shift,",
    ),
    Mutant(
        "first head of the destination",
        "plan/edge.py",
        "dst_offset=b_shift + (units.start - pb.units.start) * pb.unit_stride,",
        "dst_offset=b_shift,",
    ),
    Mutant(
        "head strides swapped",
        "plan/edge.py",
        "axes = [Axis(units.size, pa.unit_stride, pb.unit_stride)]",
        "axes = [Axis(units.size, pb.unit_stride, pa.unit_stride)]",
    ),
    Mutant(
        "padding that one side has not",
        "plan/pieces.py",
        "<= min(src.page_slack, dst.page_slack)",
        "<= max(src.page_slack, dst.page_slack)",
    ),
    Mutant(
        "layers taken for evenly spaced",
        "plan/pieces.py",
        "return int(steps[0]) if (steps == steps[0]).all() else IRREGULAR",
        "return int(steps[0])",
    ),
    Mutant(
        "layers that a rank has not",
        "plan/edge.py",
        "        if missing:\n",
        "        if missing < 0:\n",
    ),
    Mutant(
        "heads that a rank has not",
        "plan/edge.py",
        "if not placed.units[0] <= units[0] <= units[1] <= placed.units[1]:",
        "if units[0] > units[1]:",
    ),
    Mutant(
        "axes of which one ends first",
        "plan/pieces.py",
        "if (ours or theirs) and any(",
        "if not axes and any(",
    ),
    Mutant(
        "stages of another number of layers",
        "layout/model.py",
        "if src.num_layers != dst.num_layers:",
        "if src.num_layers < 0:",
    ),
    # who sends
    Mutant(
        "any dcp rank will do",
        "plan/assign.py",
        "and rank % dcp == phase",
        "and phase >= 0",
    ),
    Mutant(
        "dcp ranks meet at one end only",
        "plan/assign.py",
        "return ahead < src_interleave or period - ahead < dst_interleave",
        "return ahead < src_interleave",
    ),
    Mutant(
        "all from the first replica",
        "plan/assign.py",
        "owner = middles * len(holders) // (2 * ends[-1])",
        "owner = middles * 0",
    ),
    Mutant(
        "cover not checked",
        "plan/cover.py",
        "wrong = np.argwhere(count != expected)",
        "wrong = np.argwhere(count < 0)",
    ),
    Mutant(
        "tail begins one too late",
        "plan/cover.py",
        "return [Span(paging.local_count(range_.stop), blocks * paging.block_entries)]",
        "return [Span(paging.local_count(range_.stop) + 1, blocks * paging.block_entries)]",
    ),
    # binding
    Mutant(
        "neighbours on one side",
        "copies.py",
        "apart = ~(follows & (self.dst[1:] - self.dst[:-1] == self.length[:-1]))",
        "apart = ~follows",
    ),
    Mutant(
        "source's ids at the destination",
        "plan/bind.py",
        "dst = _offsets(piece.dst, dst_ids[which], segments.dst_slot[which], runs.dst_slot)",
        "dst = _offsets(piece.dst, src_ids[which], segments.dst_slot[which], runs.dst_slot)",
    ),
    Mutant(
        "all segments as long as the first",
        "plan/bind.py",
        "lengths = segments.forms[:, 0][segments.kinds[which]] * runs.entry_bytes",
        "lengths = np.full(len(src), runs.length, dtype=np.int64)",
    ),
    Mutant(
        "blocks written twice",
        "plan/bind.py",
        "twice = ids[1:][ids[1:] == ids[:-1]]",
        "twice = ids[:0]",
    ),
    Mutant(
        "null block used",
        "plan/bind.py",
        "if side.null_block is not None and (ids == side.null_block).any():",
        "if side.null_block is not None and (ids == side.null_block).all():",
    ),
]


def broken_copy(mutant: Mutant, folder: Path) -> Path:
    source = folder / "src"
    shutil.copytree(
        ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    path = source / "kvferry" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"mutant {mutant.name!r}: expected its text once in {mutant.file}, found it "
            f"{text.count(mutant.old)} times; adapt the mutant to the code"
        )
    path.write_text(text.replace(mutant.old, mutant.new))
    return source


def killer(mutant: Mutant, pairs: int) -> str | None:
    """What noticed the mutant; None when it lives."""
    with tempfile.TemporaryDirectory() as folder:
        source = broken_copy(mutant, Path(folder))
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        tests = [str(ROOT / "tests" / "unit" / name) for name in TESTS]
        pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        for name, command in (
            ("oracle", ["-c", SWEEP, str(pairs)]),
            ("unit tests", [*pytest, *tests]),
        ):
            try:
                result = subprocess.run(
                    [sys.executable, *command],
                    env=environment,
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"{name}: no end within {SECONDS} s"
            if result.returncode:
                lines = (result.stderr or result.stdout).strip().splitlines() or ["failed"]
                return f"{name}: {lines[-1][:110]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="the mutants whose name contains this")
    parser.add_argument("--pairs", type=int, default=160)
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.only or arguments.only in m.name]
    alive = []
    began = time.monotonic()
    for number, mutant in enumerate(chosen, 1):
        by = killer(mutant, arguments.pairs)
        if by is None:
            alive.append(mutant.name)
        print(
            f"{number:2}/{len(chosen)} {'DIED ' if by else 'ALIVE'} {mutant.name}: {by}", flush=True
        )
    seconds = time.monotonic() - began
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants died, {seconds:.0f} s")
    if alive:
        sys.exit(f"alive: {', '.join(alive)}")


if __name__ == "__main__":
    main()
