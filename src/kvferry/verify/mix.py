"""What a case has, by name: a sweep reports the share of each."""

from __future__ import annotations

from kvferry.verify.case import CaseDict


def features(case: CaseDict) -> tuple[str, ...]:
    """What a case has, for the mix."""
    src, dst, groups = case["src"]["shape"], case["dst"]["shape"], case["model"]["groups"]
    both = (src, dst)

    def unrelated(a: int, b: int) -> bool:
        return max(a, b) % min(a, b) != 0

    split = [c["units"] for g in groups for c in g["components"] if c["sharding"] == "split"]
    found = {
        "non_dividing_tp": unrelated(src["tp"], dst["tp"]),
        "different_order": src["order"] != dst["order"],
        "unrelated_blocks": unrelated(src["block_size"], dst["block_size"]),
        "pp_both": min(src["pp"], dst["pp"]) > 1,
        "uneven_stages": any(len(set(s["stages"])) > 1 for s in both),
        "dcp": any(s["dcp"] > 1 for s in both),
        "dcp_both": all(s["dcp"] > 1 for s in both),
        "kernel_blocks": any(s["kernel_block_size"] not in (0, s["block_size"]) for s in both),
        "kernel_blocks_by_group": any(s["kernel_block_size_of"] for s in both),
        "overlay": any(s["overlay"] for s in both),
        "padding": any(s["page_align"] > 1 for s in both),
        "different_interior": (src["interior"], src["interior_of"])
        != (dst["interior"], dst["interior_of"]),
        "replicated_both": any(units < min(src["tp"], dst["tp"]) for units in split),
        "role_tp": any(s["role_tp"] for s in both),
        "one_sided_role": any(s["absent_roles"] for s in (case["src"], case["dst"])),
        "full_residency": any(s["full_residency"] for s in both),
        "skip": case["skip"] > 0,
        "fault": bool(case["fault"]),
        f"model_{case['kind']}": True,
    }
    return tuple(name for name, is_so in found.items() if is_so)
