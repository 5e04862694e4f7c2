"""`kvferry bench handover` as tables: what each connector costs, and every target's verdict."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.bench.handover import LEAST_STALL_MS, NOISE, HandoverResult, verdicts

COLUMNS = ("first token", "P cpu", "D cpu", "P step", "D step", "gap", "wrong")


def print_handover(results: Sequence[HandoverResult]) -> None:
    print(f"{'milliseconds':22}" + "".join(f"{title:>12}" for title in COLUMNS))
    for one in results:
        if one.error:
            print(f"{one.name:22}did not run: {one.error.splitlines()[-1]}")
            continue
        figures = (
            one.first_token_ms,
            one.prefill_cpu_ms,
            one.decode_cpu_ms,
            one.prefill_step_ms,
            one.decode_step_ms,
            one.gap_ms,
        )
        print(f"{one.name:22}" + "".join(f"{x:12.1f}" for x in figures) + f"{one.wrong:12}")
    print(
        f"\nnot slower (to within {NOISE:.0%}, what equal engines differ by; steps below "
        f"{LEAST_STALL_MS:.0f} ms are alike):"
    )
    for target in verdicts(results):
        print(
            f"  {'yes' if target.met else 'NO':4}{target.what}: {target.ours_ms:.1f} ms, "
            f"{target.theirs} {target.theirs_ms:.1f} ms"
        )
